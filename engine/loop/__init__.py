"""The one event loop, what it talks to, and the role of a worker that runs alone."""
