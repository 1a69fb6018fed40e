"""Weights that trainers send: tensors of a request or of a process group."""
