"""Images in requests: data URLs, and safe fetching by URL. For workers and routers."""
