"""How loaded a worker is, in what its role runs out of first. Pure: two keys to compare workers by, ties included.

prefill   prompt tokens that wait to be computed and are in no cache: what we sent, and what the worker says others did
decode    KV that its requests will have taken when they end, as a share of its capacity
unified   as decode: KV is what makes requests wait there

Some of a pool are compared one by one. A whole pool has an order (load_order.py), and the same comes of it, sooner from four on.
"""

from collections.abc import Sequence

from router.choice.load_order import LoadOrder, OrderByShare, load_key
from router.pool.pools import WorkerPool
from router.pool.worker import Role, Worker


def least_loaded(candidates: Sequence[Worker]) -> Worker:
    """The one with the least load."""
    if isinstance(candidates, WorkerPool):
        return _order_of(candidates).first()
    by_share = comparable_by_share(candidates)
    return min(candidates, key=lambda worker: load_key(worker, by_share=by_share))


def comparable_by_share(candidates: Sequence[Worker]) -> bool:
    """Whether these hold KV and all say how much: a big worker may then hold more. Else tokens are compared."""
    return candidates[0].role is not Role.PREFILL and all(worker.capacity_tokens > 0 for worker in candidates)


def _order_of(pool: WorkerPool) -> LoadOrder:
    if pool[0].role is not Role.PREFILL:
        by_share = pool.derived(OrderByShare)
        by_share.catch_up()
        if by_share.all_say():
            return by_share
    return order_by_tokens(pool)


def order_by_tokens(pool: WorkerPool) -> LoadOrder:
    """As it is now."""
    order = pool.derived(LoadOrder)
    order.catch_up()
    return order
