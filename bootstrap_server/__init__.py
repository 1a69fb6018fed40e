"""bootstrap_server."""
