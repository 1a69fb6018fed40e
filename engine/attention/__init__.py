"""Attention backends: C kernels, Triton kernels, plain torch."""
