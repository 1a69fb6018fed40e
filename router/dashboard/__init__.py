"""The page at /dashboard, with its static files."""
