"""The prefill process: queue, chunked prefill, layer push."""
