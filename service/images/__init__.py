"""Images that requests name by URL: data URLs, and files that a server fetches without reaching its own network. Workers and routers share it."""
