"""How loaded a worker is, in what its role runs out of first. Pure: two keys to compare workers by, ties included.

prefill   prompt tokens that wait to be computed and are in no cache: what we sent, and what the worker says others did
decode    KV that its requests will have taken when they end, as a share of its capacity
unified   as decode: KV is what makes requests wait there
"""

from collections.abc import Sequence

from router.pool.workers import Role, Worker

LoadKey = tuple[float, int, int, int]


def load_key(worker: Worker, *, by_share: bool = False) -> LoadKey:
    """Less is less loaded; then fewer requests; then fewer so far; then the oldest worker."""
    load = worker.load_tokens / _capacity(worker) if by_share else worker.load_tokens
    return (load, worker.inflight_requests, worker.assigned_total, worker.worker_id)


def least_loaded(candidates: Sequence[Worker]) -> Worker:
    """The one with the least load."""
    if len(candidates) == 1:
        return candidates[0]
    by_share = comparable_by_share(candidates)
    return min(candidates, key=lambda worker: load_key(worker, by_share=by_share))


def comparable_by_share(candidates: Sequence[Worker]) -> bool:
    """Whether these hold KV and all say how much: a big worker may then hold more. Else tokens are compared."""
    return candidates[0].role is not Role.PREFILL and all(_capacity(worker) > 0 for worker in candidates)


def _capacity(worker: Worker) -> int:
    return worker.report.capacity_tokens if worker.report is not None else 0
