"""A worker of a planned cluster as its router sees it: what it sent there and has not got back."""

from collections.abc import Callable

from planner.worker import PlanWorker


class Placed:
    """`num_legs`: requests that are in flight there."""

    def __init__(self, worker: PlanWorker) -> None:
        self.worker = worker
        self.num_legs = 0
        self._on_drained: Callable[[], None] | None = None

    def take(self) -> None:
        self.num_legs += 1

    def give_back(self) -> None:
        self.num_legs -= 1
        self._tell_drained()

    def drain(self, on_drained: Callable[[], None]) -> None:
        """It is sent nothing new; `on_drained` is called once, when it has nothing left."""
        self._on_drained = on_drained
        self._tell_drained()

    def _tell_drained(self) -> None:
        if self._on_drained is not None and not self.num_legs:
            on_drained, self._on_drained = self._on_drained, None
            on_drained()
