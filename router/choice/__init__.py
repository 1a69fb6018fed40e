"""Choice of workers: policies, prefix index, KV events."""
