"""Lines of the log about workers, one for each change."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from router.pool.breaker import Health
from router.pool.reports import IS_DRAINING
from router.pool.worker import Worker
from router.pool.workers import WorkerTable

log = logging.getLogger(__name__)

MISFITS_EVERY_S = 0.25  # thousands of workers may start at once


@dataclass(eq=False)
class HealthLog:
    """Remembers, by id, what has a line."""

    table: WorkerTable
    _unreached: set[int] = field(default_factory=set)
    _paused: dict[int, str] = field(default_factory=dict)
    _misfits: Mapping[int, str] = field(default_factory=dict)
    _misfits_due_s: float = 0.0

    def on_check(self, worker: Worker, *, changed: bool, reached: bool) -> None:
        """`changed`: its health. `reached`: it answered."""
        if reached or changed:
            self._unreached.discard(worker.worker_id)
        if changed:
            level = logging.INFO if worker.health is Health.UP else logging.WARNING
            log.log(level, "%s worker %s is %s%s", worker.role, worker.url, worker.health, _because(worker))
        elif not reached and worker.worker_id not in self._unreached and self._is_awaited(worker):
            self._unreached.add(worker.worker_id)
            log.warning("%s worker %s cannot be reached: %s", worker.role, worker.url, worker.checks.error)

    def _is_awaited(self, worker: Worker) -> bool:
        return worker.health is Health.STARTING and worker.checks.streak >= self.table.health.health_failure_threshold

    def on_pause(self, worker: Worker) -> None:
        before, now = self._paused.get(worker.worker_id, ""), worker.process.paused
        if now and now != before:
            self._paused[worker.worker_id] = now
            text = "%s worker %s is paused (%s): requests wait there until /continue_generation"
            log.warning(text, worker.role, worker.url, now)
        elif before and not now:
            del self._paused[worker.worker_id]
            log.info("%s worker %s is no longer paused", worker.role, worker.url)

    def on_round(self, now_s: float) -> None:
        """Name workers that fit no peer, or fit again."""
        if now_s < self._misfits_due_s:
            return
        self._misfits_due_s = now_s + MISFITS_EVERY_S
        before, now = self._misfits, self.table.misfits
        if now == before:
            return
        self._misfits = now
        for reason in dict.fromkeys(reason for worker_id, reason in now.items() if worker_id not in before):
            log.warning("these workers get no request together: %s", reason)
        for worker in self.table.workers():
            if worker.worker_id in before and self.table.has_peer(worker):
                log.info("%s worker %s has a peer that fits", worker.role, worker.url)

    def forget(self, worker: Worker) -> None:
        self._unreached.discard(worker.worker_id)
        self._paused.pop(worker.worker_id, None)


def _because(worker: Worker) -> str:
    error = worker.checks.error
    return f": {error}" if error and error != IS_DRAINING else ""
