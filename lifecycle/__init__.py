"""How a process of ours is asked to end. A leaf: imports nothing of ours."""
