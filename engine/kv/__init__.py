"""KV cache memory: pools on device and host, page tables, copies, page identity."""
