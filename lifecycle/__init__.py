"""How a process of ours is asked to end, and what it asks of the system and of Python. A leaf: imports nothing of ours."""
