"""What processes say of the requests they serve: log lines, records of stages, spans. A leaf, like `security/`."""
