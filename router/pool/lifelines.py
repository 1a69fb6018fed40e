"""Which legs wait for a worker, and which of them wait in vain. Pure: told of waits, of workers' health and of the time.

A leg is given up when, both for `timeout_s`, its worker answered no health check well and no byte came; and at once when
another process answers at its worker's address and no byte came since the old one was last seen. A leg that gets bytes, or
whose client is too slow to take them, is never given up.
"""

import math
from dataclasses import dataclass, field
from typing import Protocol

from router.pool.states import Health
from router.pool.worker import Worker


class Waiting(Protocol):
    """A leg, as far as it is known here. `waits_since_s`: nothing came since then; None: its client does not take what came.

    `heard_s`: when bytes came last, -inf: none did.
    """

    @property
    def worker(self) -> Worker: ...

    @property
    def waits_since_s(self) -> float | None: ...

    @property
    def heard_s(self) -> float: ...

    def give_up(self, why: str) -> None:
        """End the leg; it is not told of again."""


@dataclass(slots=True)
class Lifelines:
    """All legs that run. `timeout_s` 0: none is ever given up."""

    timeout_s: float
    _of: dict[int, dict[int, Waiting]] = field(default_factory=dict)  # by worker, in the order they began

    def __len__(self) -> int:
        return sum(len(legs) for legs in self._of.values())

    def begin(self, leg: Waiting) -> None:
        self._of.setdefault(leg.worker.worker_id, {})[id(leg)] = leg

    def over(self, leg: Waiting) -> None:
        """The leg has ended; a second time does nothing."""
        legs = self._of.get(leg.worker.worker_id, {})
        legs.pop(id(leg), None)
        if not legs:
            self._of.pop(leg.worker.worker_id, None)

    def heard_s(self, worker: Worker) -> float:
        """When any leg that runs there got bytes last; -inf: none did."""
        legs = self._of.get(worker.worker_id, {})
        return max((leg.heard_s for leg in legs.values()), default=-math.inf)

    def is_waited_for(self, worker: Worker) -> bool:
        """Whether any leg runs there."""
        return worker.worker_id in self._of

    def give_up(self, worker: Worker, now_s: float) -> int:
        """End the legs that wait in vain for `worker`; how many."""
        legs = self._of.get(worker.worker_id, {}) if self.timeout_s else {}
        vain = [(leg, why) for leg in legs.values() if (why := _why_vain(leg, now_s, timeout_s=self.timeout_s))]
        for leg, why in vain:
            self.over(leg)
            leg.give_up(why)
        return len(vain)


def _why_vain(leg: Waiting, now_s: float, *, timeout_s: float) -> str:
    """Why nobody will answer any more; "" where somebody may."""
    worker, since_s = leg.worker, leg.waits_since_s
    if since_s is None:
        return ""
    if since_s < worker.former_life_s:
        return "the process that had this request is gone, another one answers at its address"
    if worker.health is not Health.DOWN or now_s - max(since_s, worker.good_s) < timeout_s:
        return ""
    silent = f"no good health check for {now_s - worker.good_s:.0f} s (--dead-worker-timeout)"
    return f"no answer, and {silent}: {worker.last_error}"
