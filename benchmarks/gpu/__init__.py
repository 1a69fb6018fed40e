"""Parts of `benchmarks.gpu_check`: what one GPU reaches, each part in a process of its own."""
