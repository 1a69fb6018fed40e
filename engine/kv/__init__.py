"""The KV cache in memory: pools on device and host, page tables, what is copied between them, and what names a page."""
