"""Quantized weights: what formats store, as tensors. Knows no models and no files."""
