"""Keys, signatures, addresses and limits."""
