"""Groups of prefill and decode workers with one KV layout. Pure.

    prefill  a a b -      a, b: layouts     groups   a: prefill a a -   decode a -
    decode   a b b -      -: unknown                 b: prefill b -     decode b b -

A request takes its pair from one group. A worker of unknown layout fits all: it may be SGLang's.
"""

from collections.abc import Iterable, Sequence

from router.pool.worker import Pool, Worker
from service.kv_layout import layout_conflict

Group = tuple[Pool, ...]  # a pool for each role of a route


def fits(one: Worker, other: Worker) -> bool:
    mine, theirs = one.process.layout, other.process.layout
    return mine is None or theirs is None or mine == theirs


def groups_of(pools: Sequence[Pool]) -> list[Group]:
    """Each group has a worker for each role."""
    known = [w.process.layout for pool in pools for w in pool if w.process.layout is not None]
    found: list[Group] = [tuple(pools)]
    if len(pools) > 1 and any(one is not known[0] for one in known):  # equal ones are mostly one object (read_layout)
        found = [
            tuple([w for w in pool if w.process.layout in (None, one)] for pool in pools)
            for one in dict.fromkeys(known)
        ]
    return [group for group in found if all(group)]


def misfits_of(prefill: Pool, decode: Pool) -> dict[int, str]:
    """Return why workers have peers but none that fits, by id."""
    prefills, decodes = _unlike(prefill), _unlike(decode)
    found = {w.worker_id: _reason([(w, peer) for peer in decodes]) for w in prefill}
    found |= {w.worker_id: _reason([(peer, w) for peer in prefills]) for w in decode}
    return {worker_id: reason for worker_id, reason in found.items() if reason}


def _unlike(pool: Pool) -> list[Worker]:
    """One of each model and layout."""
    return list({(w.models[:1], w.process.layout): w for w in reversed(pool)}.values())


def _reason(pairs: Iterable[tuple[Worker, Worker]]) -> str:
    """Return "" if one fits."""
    reason = ""
    for prefill, decode in pairs:
        conflict = _conflict(prefill, decode)
        if not conflict:
            return ""
        reason = reason or conflict
    return reason


def _conflict(prefill: Worker, decode: Worker) -> str:
    me, them = f"prefill worker {prefill.url}", f"decode worker {decode.url}"
    one, other = prefill.models, decode.models
    if one and other and one[0] not in other and other[0] not in one:
        return f"model differs: {me} serves {prefill.models[0]!r}, {them} serves {decode.models[0]!r}"
    if prefill.process.layout is None or decode.process.layout is None:
        return ""
    return layout_conflict(prefill.process.layout, decode.process.layout, me=me, them=them) or ""
