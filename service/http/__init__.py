"""HTTP of all servers: worker, router and bootstrap server."""
