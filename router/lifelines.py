"""Which legs wait for a worker, and which of them wait in vain. Pure: told of waits, of workers' health and of the time.

A leg is given up when, both for `timeout_s`, its worker answered no health check well and no byte came; and at once when
another process answers at its worker's address and no byte came since the old one was last seen. A leg that gets bytes, or
whose client is too slow to take them, is never given up.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from router.workers import Health, Worker


@dataclass(slots=True, eq=False, kw_only=True)
class Lifeline:
    """One leg. `waits_since_s`: nothing came since then, though we read; None: we do not read now.

    `cut`: ends the wait. `why`: set before it is called.
    """

    worker: Worker
    waits_since_s: float | None
    cut: Callable[[], None]
    why: str = ""


@dataclass(slots=True)
class Lifelines:
    """All legs that run. `timeout_s` 0: none is ever given up."""

    timeout_s: float
    _of: dict[int, dict[int, Lifeline]] = field(default_factory=dict)  # by worker, in the order they began

    def __len__(self) -> int:
        return sum(len(lines) for lines in self._of.values())

    def begin(self, worker: Worker, *, cut: Callable[[], None], now_s: float) -> Lifeline:
        line = Lifeline(worker=worker, waits_since_s=now_s, cut=cut)
        self._of.setdefault(worker.worker_id, {})[id(line)] = line
        return line

    def over(self, line: Lifeline) -> None:
        """The leg has ended; a second time does nothing."""
        line.waits_since_s = None
        lines = self._of.get(line.worker.worker_id, {})
        lines.pop(id(line), None)
        if not lines:
            self._of.pop(line.worker.worker_id, None)

    def is_waited_for(self, worker: Worker) -> bool:
        """Whether any leg runs there."""
        return worker.worker_id in self._of

    def give_up(self, worker: Worker, now_s: float) -> int:
        """Cut the legs that wait in vain for `worker`; how many."""
        lines = self._of.get(worker.worker_id, {}) if self.timeout_s else {}
        vain = [(line, why) for line in lines.values() if (why := _why_vain(line, now_s, timeout_s=self.timeout_s))]
        for line, why in vain:
            line.why = why
            self.over(line)
            line.cut()
        return len(vain)


def _why_vain(line: Lifeline, now_s: float, *, timeout_s: float) -> str:
    """Why nobody will answer any more; "" where somebody may."""
    worker, since_s = line.worker, line.waits_since_s
    if since_s is None:
        return ""
    if since_s < worker.former_life_s:
        return "the process that had this request is gone, another one answers at its address"
    if worker.health is not Health.DOWN or now_s - max(since_s, worker.good_s) < timeout_s:
        return ""
    silent = f"no good health check for {now_s - worker.good_s:.0f} s (--dead-worker-timeout-s)"
    return f"no answer, and {silent}: {worker.last_error}"
