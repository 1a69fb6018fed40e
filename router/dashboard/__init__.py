"""The page at /dashboard: the live state of router and workers. Its static files are in this
directory.
"""
