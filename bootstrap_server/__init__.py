"""Registry of prefill workers: protocol, registry, HTTP app, client."""
