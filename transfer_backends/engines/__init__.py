"""Implementations of `transfer_backends.ports.Engine`."""
