"""The router as a client of its workers: sessions, keys, one request and its answer."""
