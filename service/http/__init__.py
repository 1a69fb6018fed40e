"""HTTP of all servers."""
