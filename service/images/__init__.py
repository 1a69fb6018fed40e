"""Images in requests: data URLs, and fetching by URL."""
