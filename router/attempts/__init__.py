"""A client request, its attempts, their upstream calls and events."""
