"""A worker of a planned cluster as the router sees it: the number of requests in flight there."""

from collections.abc import Callable

from planner.worker import PlanWorker


class PooledWorker:
    def __init__(self, worker: PlanWorker) -> None:
        self.worker = worker
        self.num_requests = 0
        self._on_drained: Callable[[], None] | None = None

    def begin(self) -> None:
        self.num_requests += 1

    def end(self) -> None:
        self.num_requests -= 1
        self._check_drained()

    def drain(self, on_drained: Callable[[], None]) -> None:
        """Call `on_drained` once, when no request is left. The caller sends no new one."""
        self._on_drained = on_drained
        self._check_drained()

    def _check_drained(self) -> None:
        if self._on_drained is not None and not self.num_requests:
            on_drained, self._on_drained = self._on_drained, None
            on_drained()
