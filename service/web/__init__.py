"""What pages share: style, colours, elements, icon, key, theme, time line; and the page at /docs. Files for browsers; no Python."""
