"""Attention behind one interface: C kernels, Triton kernels, plain torch."""
