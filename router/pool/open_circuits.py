"""Workers with blocking circuits, cached until a change or timeout. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from router.pool.breaker import State
from router.pool.worker import Worker


@dataclass(slots=True)
class OpenCircuits:
    _unsettled: dict[int, Worker] = field(default_factory=dict)  # with circuits that are not closed
    _shut: frozenset[int] = frozenset()
    _due_s: float = -math.inf  # when `_shut` expires

    @property
    def any(self) -> bool:
        return bool(self._unsettled)

    def shut(self, now_s: float) -> frozenset[int]:
        if now_s >= self._due_s:
            workers = list(self._unsettled.values())
            self._shut = frozenset([w.worker_id for w in workers if not w.circuit.takes(now_s)])
            self._due_s = min((w.circuit.waits_until_s for w in workers if w.worker_id in self._shut), default=math.inf)
        return self._shut

    def on_change(self, worker: Worker) -> None:
        if worker.circuit.state is State.CLOSED:
            self._unsettled.pop(worker.worker_id, None)
        else:
            self._unsettled[worker.worker_id] = worker
        self.on_trial()

    def on_trial(self) -> None:
        self._due_s = -math.inf

    def forget(self, worker: Worker) -> None:
        self._unsettled.pop(worker.worker_id, None)
        self.on_trial()

    def check(self, workers: Iterable[Worker]) -> None:
        assert sorted(self._unsettled) == [w.worker_id for w in workers if w.circuit.state is not State.CLOSED]
