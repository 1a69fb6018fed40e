"""Parts of requests, a module for each feature; only router/compose/ imports them."""
