"""A client request, its attempts at workers, their upstream calls and events."""
