"""A worker's HTTP server: APIs, metrics, client of the scheduler."""
