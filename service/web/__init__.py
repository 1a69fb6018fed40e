"""What the pages of every server share, for browsers: style, icon, and the page at /docs. No code."""
