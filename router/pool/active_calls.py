"""Calls that wait for a worker: gives up vain ones, selects those to migrate. Pure.

A call is given up after `timeout_s` without a good health check or a byte; at once if another
process answers; without alternatives after twice the silence limit. Never if it gets bytes, or its
client reads slowly.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from router.pool.breaker import Health
from router.pool.worker import Pool, Worker

PAUSES = 2  # times the silence limit; a shorter silence may be a pause


class ActiveCall(Protocol):
    """`waits_since_s` is None while its client is slow. `movable`: another worker can continue;
    `continuable`: without recomputing sent tokens. `names_owner`: guard.py.
    """

    names_owner: str

    @property
    def waits_since_s(self) -> float | None: ...

    @property
    def last_byte_s(self) -> float: ...

    @property
    def movable(self) -> bool: ...

    @property
    def continuable(self) -> bool: ...

    def leave(self) -> Mapping[str, int]:
        """Return rooms for samples that can move with their KV; ends `movable`."""

    def give_up(self, why: str) -> None: ...


LetGo = Callable[[Worker, Sequence[ActiveCall], str], None]  # takes calls from a worker, with a reason


def last_sign_s(worker: Worker) -> float:
    """The last byte of a check, heartbeat or call."""
    return max((worker.checks.heard_s, *(call.last_byte_s for call in worker.calls)))


def give_up_vain_calls(worker: Worker, now_s: float, *, timeout_s: float) -> int:
    """`timeout_s` 0 disables this."""
    if not timeout_s:
        return 0
    vain = [(call, why) for call in worker.calls if (why := _why_vain(worker, call, now_s, timeout_s=timeout_s))]
    for call, why in vain:
        worker.calls.pop(call, None)
        call.give_up(why)
    return len(vain)


def waits_at_silent(worker: Worker, now_s: float, *, silence_s: float) -> list[ActiveCall]:
    """Calls at a worker silent beyond a pause, which no other can continue."""
    if now_s - last_sign_s(worker) < PAUSES * silence_s:
        return []
    waits = [(call, call.waits_since_s) for call in worker.calls]
    return [call for call, since_s in waits if since_s is not None and now_s - since_s >= silence_s]


def calls_for_others(worker: Worker, *, answers: bool) -> list[ActiveCall]:
    """`answers`: the worker still responds."""
    return [call for call in worker.calls if (call.continuable if answers else call.movable)]


def give_up_all(worker: Worker, calls: Iterable[ActiveCall], why: str) -> None:
    for call in calls:
        worker.calls.pop(call, None)
        call.give_up(why)


def num_to_give(worker: Worker, pool: Pool, *, above: float) -> int:
    """Count the requests to migrate from a worker with KV usage beyond `above`.

    One worker must have room below it, at a request's mean size. As in Llumnix (OSDI 2024), but
    only to avoid retraction.
    """
    report = worker.report
    if report is None or not report.running_reqs or not report.capacity_tokens:
        return 0
    excess = report.used_tokens - above * report.capacity_tokens
    if excess <= 0:
        return 0
    room = max((_room(other, above=above) for other in pool), default=0.0)
    mean = report.used_tokens / report.running_reqs
    if room < mean:
        return 0
    return min(math.ceil(excess / mean), int(room / mean), report.running_reqs - 1)


def _why_vain(worker: Worker, call: ActiveCall, now_s: float, *, timeout_s: float) -> str:
    since_s = call.waits_since_s
    if since_s is None:
        return ""
    if since_s < worker.process.former_s:
        return "the process that had this request is gone, another one answers at its address"
    if worker.health is not Health.DOWN or now_s - max(since_s, worker.checks.good_s) < timeout_s:
        return ""
    silent = f"no good health check for {now_s - worker.checks.good_s:.0f} s (--dead-worker-timeout)"
    return f"no answer, and {silent}: {worker.checks.error}"


def _room(worker: Worker, *, above: float) -> float:
    report = worker.report
    if report is None or not worker.answers:
        return 0.0
    return above * report.capacity_tokens - report.used_tokens - report.pending_tokens
