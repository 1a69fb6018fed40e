"""The page at /chat, of routers and of workers that serve alone: a conversation with a model, and behind a router where each request went. Files for browsers; no Python."""
