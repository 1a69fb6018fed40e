"""What the router's pages share: colours, elements, key, theme, time line. Files for browsers; no Python."""
