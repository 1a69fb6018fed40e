"""One client's request while it is served: what it requests, what was decided, how far its answer is; times in its headers."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
from aiohttp import web

from router.attempts.failed_workers import FailedWorkers
from router.attempts.upstream_call import CallFailed
from router.body import Api, BadBody, ParsedBody
from router.choice.policies import Placement, RoutingHints
from router.pool.worker import Way, Worker
from service.http.deadline import UNITS_S, seconds_of
from service.http.keep_alive import KeepAlive

TTFT_HEADER = "x-slo-ttft-ms"
ITL_HEADER = "x-slo-itl-ms"
LEAST_S = 0.001  # that a retry gives its workers: one may still be idle


class Slo(msgspec.Struct, frozen=True):
    """Objectives of one request, in seconds; inf: none."""

    ttft_s: float = math.inf
    itl_s: float = math.inf


class AnswerKeeper(Protocol):
    """Sees an answer before the client does: a whole one, or a stream's events. `close` follows, however it ended."""

    def on_answer(self, body: bytes) -> None: ...
    def on_events(self, events: bytes) -> None: ...
    def close(self) -> None: ...


class RequestContext(msgspec.Struct, kw_only=True, eq=False):
    """One request from its arrival to the end of its answer. Times are the router's clock."""

    http: web.BaseRequest
    task: "asyncio.Task[object]"
    request_id: str
    path: str
    started_s: float
    caller: str = ""  # the name of its key

    # Read of the body and the headers.
    body: bytes = b""
    parsed: ParsedBody = ParsedBody(api=Api.GENERATE, fields={})
    hints: RoutingHints = RoutingHints()
    slo: Slo | None = None  # None: no objectives
    ways: tuple[Way, ...] = ()  # that it may go
    dp_rank: int | None = None  # of both workers that is to serve it; None: any
    model: str = ""  # that its workers must serve; "": any
    images: tuple[str, ...] = ()  # digests of those in its body, in order of appearance
    traceparent: str = ""  # sent to workers; "": the client's
    headers: Mapping[str, str] = {}  # sent to workers

    digest: str = ""  # of what the client sent; "": no one needs it
    events_first: bytes = b""  # sent to the client before a worker's events

    keeper: AnswerKeeper | None = None  # None: nothing is remembered of the answer

    # So far.
    failed: FailedWorkers | None = None  # None: no attempt has failed
    first_byte_s: float | None = None
    last_byte_s: float = 0.0
    num_chunks: int = 0
    failure: str = ""  # why the answer ended early, after its status had left
    handed_back: bool = False
    cut: Callable[[], None] | None = None  # closes the stream that the answer is read from
    alive: KeepAlive | None = None  # keeps the client's stream open; None: nothing does

    def headers_at(self, now_s: float) -> Mapping[str, str]:
        """The headers of an attempt that begins then, when less of the client's time is left. They count milliseconds."""
        elapsed_s = now_s - self.started_s
        return self.headers if elapsed_s < LEAST_S else less_time(self.headers, elapsed_s)

    def note_failed(self, failure: CallFailed, workers: Sequence[Worker]) -> None:
        """Record that `failure` ended the attempt at `workers`: others come first for the next."""
        if self.failed is None:
            self.failed = FailedWorkers(failure)
        self.failed.note(failure, workers)

    def ends_workers(self, most: int) -> bool:
        """Whether more than `most` workers died under it: it may be what they died of."""
        return self.failed is not None and self.failed.num_deaths > most

    def fails_by_itself(self, placements: Sequence[Placement] = ()) -> bool:
        """Whether it is to blame for its failure, or an attempt at `placements` could not tell."""
        if self.failed is None:
            return False
        return self.failed.is_own or (bool(placements) and self.failed.decides_nothing(p.worker for p in placements))

    def hand_back(self) -> None:
        """End it because the router ends: cut its stream, whose last event then says why, or cancel its handler."""
        self.handed_back = True
        if self.cut is not None:
            self.cut()
        else:
            self.task.cancel()

    def took_cancel(self) -> bool:
        """In a handler that is being cancelled: whether `hand_back` did it (then the handler answers), not the client."""
        if self.handed_back:
            self.task.uncancel()
        return self.handed_back


def time_given(headers: Mapping[str, str]) -> float:
    """Seconds that the client of a request with `headers` (names in lower case) will wait; inf: no limit."""
    return min((value_s for name in UNITS_S if (value_s := _patience_s(headers, name)) is not None), default=math.inf)


def less_time(headers: Mapping[str, str], elapsed_s: float) -> dict[str, str]:
    """`headers` (of the first attempt, names in lower case) for one that begins `elapsed_s` later.

    What is no number passes as it is: the worker refuses it.
    """
    left = dict(headers)
    for name, unit_s in UNITS_S.items():
        value_s = _patience_s(headers, name)
        if value_s is not None:
            left[name] = f"{max(LEAST_S, value_s - elapsed_s) / unit_s:.3f}"
    return left


def _patience_s(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    return None if text is None else seconds_of(text, name)


def milliseconds(headers: Mapping[str, str], name: str) -> float | None:
    """A header's number above 0, in seconds; None without it. `BadBody`."""
    text = headers.get(name)
    if text is None:
        return None
    try:
        value_s = float(text) / 1000
    except ValueError:
        value_s = -1.0
    if not 0.0 < value_s < math.inf:
        raise BadBody(None, f"{name}: must be a number of milliseconds above 0; got {text[:40]!r}")
    return value_s
