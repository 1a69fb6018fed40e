"""Event loop, its interfaces, and the unified role."""
