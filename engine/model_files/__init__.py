"""Model files (directory, GGUF or hub) and their configuration. No module imports torch."""
