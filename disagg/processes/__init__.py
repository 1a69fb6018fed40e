"""The processes of a worker: its session in a role, its scheduler, its ranks, its frontends, other machines."""
