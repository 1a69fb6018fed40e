"""Moves a worker from one role to the other: it is asked to change, waited for, and is in the other pool when `move` returns."""

from router.pool.workers import Role, Worker


class SwitchRefused(Exception):
    """The worker may not move, or says that it cannot; nothing has changed."""


class SwitchFailed(Exception):
    """The worker was asked to move and did not come back in the other role; says how it ended."""


class Switch:
    async def move(self, worker: Worker, role: Role) -> None:
        """Returns when `worker` serves as `role`. Raises `SwitchRefused`, `SwitchFailed`."""
        raise NotImplementedError
