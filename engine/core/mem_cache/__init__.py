"""The memory of requests: KV pages and their prefix tree, host tiers, windows, states, images."""
