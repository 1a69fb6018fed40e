"""The decoder of all families, and checkpoint loading."""
