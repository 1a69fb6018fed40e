"""Keys, signatures, addresses, browser rule."""
