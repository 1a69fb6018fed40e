"""A client request's state, and deadline headers."""

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
LEAST_S = 0.001  # least deadline of a retry: an idle worker may meet it


class Slo(msgspec.Struct, frozen=True):
    """A request's SLO in seconds; inf for none."""

    ttft_s: float = math.inf
    itl_s: float = math.inf


class AnswerKeeper(Protocol):
    """Observer of an answer before the client. `close` always follows."""

    def on_answer(self, body: bytes) -> None: ...
    def on_events(self, events: bytes) -> None: ...
    def close(self) -> None: ...


class RequestContext(msgspec.Struct, kw_only=True, eq=False):
    """One request, with times on the router's clock."""

    http: web.BaseRequest
    task: "asyncio.Task[object]"
    request_id: str
    path: str
    started_s: float
    caller: str = ""  # the name of its key

    # From the body and the headers.
    body: bytes = b""
    parsed: ParsedBody = ParsedBody(api=Api.GENERATE, fields={})
    hints: RoutingHints = RoutingHints()
    slo: Slo | None = None  # None without SLO
    ways: tuple[Way, ...] = ()  # allowed routes
    dp_rank: int | None = None  # requested rank of both workers
    model: str = ""  # required of its workers; empty for any
    images: tuple[str, ...] = ()  # digests in order of appearance
    traceparent: str = ""  # sent to workers; empty for the client's own
    headers: Mapping[str, str] = {}  # sent to workers

    digest: str = ""  # of the client's body; empty if unused
    events_first: bytes = b""  # sent to the client before a worker's events

    keeper: AnswerKeeper | None = None  # observes the answer

    # Progress.
    failed: FailedWorkers | None = None  # None before the first failure
    first_byte_s: float | None = None
    last_byte_s: float = 0.0
    num_chunks: int = 0
    failure: str = ""  # why the answer ended early, after its status was sent
    handed_back: bool = False
    cut: Callable[[], None] | None = None  # closes the stream that the answer is read from
    alive: KeepAlive | None = None  # keeps the client's stream open

    def headers_at(self, now_s: float) -> Mapping[str, str]:
        """Return an attempt's headers, with the remaining deadline."""
        elapsed_s = now_s - self.started_s
        return self.headers if elapsed_s < LEAST_S else less_time(self.headers, elapsed_s)

    def note_failed(self, failure: CallFailed, workers: Sequence[Worker]) -> None:
        if self.failed is None:
            self.failed = FailedWorkers(failure)
        self.failed.note(failure, workers)

    def ends_workers(self, most: int) -> bool:
        return self.failed is not None and self.failed.num_deaths > most

    def fails_by_itself(self, placements: Sequence[Placement] = ()) -> bool:
        """Return whether the request caused its failure, or trying `placements` would prove
        nothing.
        """
        if self.failed is None:
            return False
        return self.failed.is_own or (bool(placements) and self.failed.decides_nothing(p.worker for p in placements))

    def hand_back(self) -> None:
        """End it for the router's shutdown: cut its stream or cancel its handler."""
        self.handed_back = True
        if self.cut is not None:
            self.cut()
        else:
            self.task.cancel()

    def took_cancel(self) -> bool:
        """Return whether `hand_back` cancelled the handler, which then answers."""
        if self.handed_back:
            self.task.uncancel()
        return self.handed_back


def time_given(headers: Mapping[str, str]) -> float:
    """Deadline in seconds, else inf; names are in lower case."""
    return min((value_s for name in UNITS_S if (value_s := _patience_s(headers, name)) is not None), default=math.inf)


def less_time(headers: Mapping[str, str], elapsed_s: float) -> dict[str, str]:
    """Return `headers` with deadlines reduced by `elapsed_s`. Workers refuse bad numbers."""
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
    """Return a header's milliseconds as seconds. Raises BadBody."""
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
