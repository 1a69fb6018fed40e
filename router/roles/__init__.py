"""Dynamic roles: switches of workers between prefill and decode."""
