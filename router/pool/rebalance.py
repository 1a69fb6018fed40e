"""How many requests a decode worker near its memory limit gives to one with room, instead of retracting them. Pure.

As in Llumnix (OSDI 2024) requests move while they run; here only to avoid a retraction, never to even loads out.
"""

import math
from functools import partial

from router.pool.load_order import LoadKey, LoadOrder
from router.pool.pool import Pool, WorkerPool
from router.pool.worker import Worker


def num_to_give(worker: Worker, others: Pool, *, above: float) -> int:
    """Count the requests by which `worker` holds more than `above` of its KV memory, as far as one of `others` has room below that share.

    A request counts as much as the mean of those that run there. 0 where reports are missing.
    """
    report = worker.report
    if report is None or not report.running_reqs or not report.capacity_tokens:
        return 0
    excess = report.used_tokens - above * report.capacity_tokens
    if excess <= 0 or not others:
        return 0
    order = others.derived(("room", above), partial(_by_room, above=above))
    order.catch_up()
    room = next((_room(other, above=above) for other in order.walk() if other in others), 0.0)
    mean = report.used_tokens / report.running_reqs
    if room < mean:
        return 0
    return min(math.ceil(excess / mean), int(room / mean), report.running_reqs - 1)


def _by_room(pool: WorkerPool, *, above: float) -> LoadOrder:
    """The worker with most room first."""

    def key(worker: Worker) -> LoadKey:
        return (-_room(worker, above=above), 0, 0, worker.worker_id)

    return LoadOrder(pool, pool.by_id, pool.log, key)


def _room(worker: Worker, *, above: float) -> float:
    """Tokens until it holds that share, with what waits for memory there."""
    report = worker.report
    if report is None or not worker.answers:
        return 0.0
    return above * report.capacity_tokens - report.used_tokens - report.pending_tokens
