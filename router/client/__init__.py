"""The router as an HTTP client of its workers."""
