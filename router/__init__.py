"""The router: chooses workers and relays answers. Imports neither torch nor engine/."""
