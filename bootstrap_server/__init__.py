"""Registry of prefill workers for decode workers: protocol, registry, HTTP app, client."""
