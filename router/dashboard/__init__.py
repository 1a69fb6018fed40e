"""The page at /dashboard: what the router and its workers do right now. Files of the page lie beside the modules."""
