"""transfer_backends."""
