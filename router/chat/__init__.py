"""The page at /chat: a conversation with a model, and where each request went. Files for browsers; no Python."""
