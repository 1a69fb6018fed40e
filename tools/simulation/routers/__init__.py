"""The routers of a simulated cluster: production parts, requests of clients, and the way to workers."""
