"""Where prefill workers register and decode workers find them: protocol, registry, HTTP app, client."""
