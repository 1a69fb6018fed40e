"""The processes of a worker: role session, scheduler, ranks, frontends, other machines."""
