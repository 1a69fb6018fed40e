"""What --model-path names: a directory, a GGUF file or a model of the hub, and what it says about its model."""
