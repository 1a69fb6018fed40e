"""The work that is charged to workers, and a log of the workers whose load changed. Pure.

A lease is one upstream call of one request; it charges tokens to its worker until it is released.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.pool.worker import Lease, LoadReport, Role, Worker

MAX_LOG = 1 << 14  # changes that are kept; a reader that is further behind reads every worker


class LoadLog:
    """Ids of workers whose load or report changed, in order; each reader remembers how far it has read.

    `has_peers`: other processes change loads without an entry here.
    """

    __slots__ = ("_dropped", "_ids", "has_peers")

    def __init__(self, *, has_peers: bool = False) -> None:
        self.has_peers = has_peers
        self._ids: list[int] = []
        self._dropped = 0

    def note(self, worker_id: int) -> None:
        self._ids.append(worker_id)
        if len(self._ids) > 2 * MAX_LOG:
            del self._ids[:MAX_LOG]
            self._dropped += MAX_LOG

    @property
    def end(self) -> int:
        return self._dropped + len(self._ids)

    def since(self, place: int) -> Sequence[int] | None:
        """Return the workers that changed since `end` was `place`; None: too many to say."""
        begin = place - self._dropped
        return self._ids[begin:] if begin >= 0 else None


@dataclass(slots=True)
class Loads:
    """All leases of one router process. Changes the load of workers, and nothing else of them."""

    log: LoadLog = field(default_factory=LoadLog)
    _leases: dict[int, Lease] = field(default_factory=dict)

    def charge(self, worker: Worker, tokens: int, *, now_s: float = 0.0) -> Lease:
        """Count a request with this many tokens at the worker until its lease is released."""
        assert tokens >= 0, tokens
        circuit = worker.circuit
        lease = Lease(worker, tokens, not circuit.quiet and circuit.send(now_s))
        self._leases[id(lease)] = lease
        worker.inflight_requests += 1
        worker.inflight_tokens += tokens
        worker.assigned_total += 1
        self._on_load(worker)
        return lease

    def release(self, lease: Lease) -> None:
        """Give a lease back. Idempotent: the calls of a request end in any order."""
        if self._leases.pop(id(lease), None) is not None:
            lease.worker.inflight_requests -= 1
            lease.worker.inflight_tokens -= lease.tokens
            if lease.trial:
                lease.worker.circuit.end_trial()
            self._on_load(lease.worker)

    def on_report(self, worker: Worker, report: LoadReport | None) -> None:
        """Take what a worker reports (None: nothing). Load that this router sent itself is not counted twice."""
        before = (worker.foreign_tokens, worker.capacity_tokens)
        worker.report = report
        reported = 0 if report is None else _reported_tokens(worker.role, report)
        worker.foreign_tokens = max(0, reported - worker.tokens_everywhere)
        if before != (worker.foreign_tokens, worker.capacity_tokens):
            self.log.note(worker.worker_id)

    def _on_load(self, worker: Worker) -> None:
        self.log.note(worker.worker_id)
        if worker.peers is not None:
            worker.peers.publish(worker.slot, tokens=worker.inflight_tokens, requests=worker.inflight_requests)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def check(self, workers: Sequence[Worker]) -> None:
        """Assert that in-flight counts are the sums of live leases."""
        for worker in [*workers, *(lease.worker for lease in self._leases.values())]:
            held = [lease.tokens for lease in self._leases.values() if lease.worker is worker]
            assert worker.inflight_requests == len(held), (worker.url, worker.inflight_requests, len(held))
            assert worker.inflight_tokens == sum(held), (worker.url, worker.inflight_tokens, sum(held))


def _reported_tokens(role: Role, report: LoadReport) -> int:
    """Prefill: what waits to be computed (its cache is no load). Else: what is in the KV cache or waits."""
    return report.waiting_tokens if role is Role.PREFILL else report.used_tokens + report.waiting_tokens
