"""A model's weights and shape, from a GGUF file or a directory of safetensors, under Hugging Face's names."""
