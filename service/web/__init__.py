"""Static files shared by pages: style, elements, theme, time line; and the page at /docs."""
