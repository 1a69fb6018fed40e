"""Quantized weights as tensors."""
