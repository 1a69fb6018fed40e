"""Static files shared by pages, and the page at /docs."""
