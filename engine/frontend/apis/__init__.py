"""Handlers, bodies and views of a worker by API; common parts in shared/."""
