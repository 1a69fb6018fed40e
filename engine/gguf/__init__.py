"""GGUF files: header, configuration, tokenizer, tensors (llama.cpp's ggml/docs/gguf.md)."""
