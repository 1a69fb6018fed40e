"""Ends calls that wait for a worker in vain (`Worker.calls`), or that others are to take over. Pure: receives the time.

A call is given up when, both for `timeout_s`, its worker passed no health check and no byte came; at once when another process
answers at the address and no byte came since the old one was last seen; and where no other worker could take it over, at a worker that
has been silent for twice the time after which others do. A call that gets bytes, or whose client is too slow to take them, is never
given up.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

from router.pool.states import Health
from router.pool.worker import Pool, Worker

PAUSES = 2  # silences that may be a pause, which costs no answer where there is no other worker


class ActiveCall(Protocol):
    """A call to a worker. `waits_since_s`: nothing came since; None: its client does not take what came.

    `movable`: another worker can do the rest; `continuable`: without computing again what the client has. `names_owner`: of the names that
    `leave` returns (service/http/caller_names.py).
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
        """Return the samples that may go on elsewhere by their KV, each with the room for it; empty: none. Such a call is neither movable nor
        continuable any more.
        """

    def give_up(self, why: str) -> None: ...


def last_sign_s(worker: Worker) -> float:
    """Return when the last byte came from `worker`: of a check, a heartbeat or a live call."""
    return max((worker.heard_s, *(call.last_byte_s for call in worker.calls)))


def give_up_vain_calls(worker: Worker, now_s: float, *, timeout_s: float) -> int:
    """End the calls that wait in vain for `worker`, and return how many. `timeout_s` 0: never."""
    if not timeout_s:
        return 0
    vain = [(call, why) for call in worker.calls if (why := _why_vain(worker, call, now_s, timeout_s=timeout_s))]
    for call, why in vain:
        worker.calls.pop(call, None)
        call.give_up(why)
    return len(vain)


def waits_at_silent(worker: Worker, now_s: float, *, silence_s: float) -> list[ActiveCall]:
    """Return what waits for a silent worker, once its silence is longer than a pause. For calls that no other worker takes over."""
    if now_s - last_sign_s(worker) < PAUSES * silence_s:
        return []
    waits = [(call, call.waits_since_s) for call in worker.calls]
    return [call for call, since_s in waits if since_s is not None and now_s - since_s >= silence_s]


def calls_for_others(worker: Worker, *, answers: bool) -> list[ActiveCall]:
    """Return the calls at `worker` that others can take over. `answers`: the worker still does."""
    return [call for call in worker.calls if (call.continuable if answers else call.movable)]


def give_up_all(worker: Worker, calls: Iterable[ActiveCall], why: str) -> None:
    for call in calls:
        worker.calls.pop(call, None)
        call.give_up(why)


def num_to_give(worker: Worker, pool: Pool, *, above: float) -> int:
    """Count the requests that `worker` gives away, as it holds more than `above` of its KV memory.

    It gives as many as one worker of `pool` has room for below that share; a request counts as much as the
    mean of those that run there. 0 where reports are missing. As in Llumnix (OSDI 2024) requests move while
    they run; here only to avoid a retraction, never to even loads out.
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
    """Return why no answer will come; "": it may."""
    since_s = call.waits_since_s
    if since_s is None:
        return ""
    if since_s < worker.former_life_s:
        return "the process that had this request is gone, another one answers at its address"
    if worker.health is not Health.DOWN or now_s - max(since_s, worker.good_s) < timeout_s:
        return ""
    silent = f"no good health check for {now_s - worker.good_s:.0f} s (--dead-worker-timeout)"
    return f"no answer, and {silent}: {worker.last_error}"


def _room(worker: Worker, *, above: float) -> float:
    """Tokens until it holds that share, with what waits for memory there."""
    report = worker.report
    if report is None or not worker.answers:
        return 0.0
    return above * report.capacity_tokens - report.used_tokens - report.pending_tokens
