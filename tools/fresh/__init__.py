"""`make fresh-check`: README's commands on a bare Debian root that this folder makes. Standard library only: it runs before setup."""
