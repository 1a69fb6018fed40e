"""GGUF files: header, model configuration, tokenizer and tensors. The format is llama.cpp's (ggml/docs/gguf.md)."""
