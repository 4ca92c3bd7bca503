"""The decode process: reservation, continuous batching, streaming token ids."""
