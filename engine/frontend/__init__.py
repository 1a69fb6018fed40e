"""A worker's server: HTTP, its APIs, metrics, and the client to the scheduler."""
