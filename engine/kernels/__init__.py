"""C kernels for CPUs and Triton kernels for GPUs."""
