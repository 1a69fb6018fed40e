"""Static files of the page at /chat, on routers and unified workers."""
