"""Static files of the page at /chat."""
