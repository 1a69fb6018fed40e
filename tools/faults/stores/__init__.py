"""A Mooncake Store of real processes, and every fault of it."""
