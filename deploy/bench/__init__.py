"""The load generator of `tandem bench`."""
