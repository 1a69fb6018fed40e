"""A client request's state, and interfaces of parts and of receivers of events.

The base path calls features' parts in the order of their tuples; router/compose/ hands them over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
from fastapi import Response

from router.attempts.upstream_call import CallFailed, FailedWorkers
from router.body import Api, BadBody, ParsedBody
from router.choice.policies import Placement, RoutingHints
from router.choice.where import Decision
from router.pool.worker import Lease, Role, Way, Worker
from service.http.errors import ApiError
from service.http.request import HttpRequest, StreamedResponse
from service.http.routes import open_stream

if TYPE_CHECKING:
    from router.attempts.pair_attempt import PairAttempt


TTFT_HEADER = "x-slo-ttft-ms"
ITL_HEADER = "x-slo-itl-ms"


class Slo(msgspec.Struct, frozen=True):
    """A request's SLO in seconds; inf for none."""

    ttft_s: float = math.inf
    itl_s: float = math.inf


class RequestRefused(ApiError):
    """A 429. `why` is its error code and its label in metrics."""

    def __init__(self, message: str, *, why: str, retry_after_s: int = 1) -> None:
        super().__init__(429, message, code=why, retry_after_s=retry_after_s)
        self.why = why


class ClientStream:
    async def open(self, http: HttpRequest, *, status: int, headers: Mapping[str, str]) -> StreamedResponse:
        return open_stream(http, status=status, headers=headers)

    async def end(self) -> None:
        """Stop all other writers, before the stream's last event."""


class RequestContext(msgspec.Struct, kw_only=True, eq=False):
    """Times are on the router's clock."""

    http: HttpRequest
    task: asyncio.Task[object]
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
    headers: Mapping[str, str] = {}  # sent to workers
    events_first: bytes = b""  # sent to the client before a worker's events
    decision: Decision | None = None  # the last
    parts: tuple[CallPart, ...] = ()  # of this request, besides the launcher's
    answer_parts: tuple[AnswerPart, ...] = ()

    # Progress.
    failed: FailedWorkers | None = None  # None before the first failure
    first_byte_s: float | None = None
    last_byte_s: float = 0.0
    num_chunks: int = 0
    failure: str = ""  # why the answer ended early, after its status was sent
    handed_back: bool = False
    cut: Callable[[], None] | None = None  # closes the stream that the answer is read from
    client: ClientStream = ClientStream()

    def note_failed(self, failure: CallFailed, workers: Sequence[Worker]) -> None:
        if self.failed is None:
            self.failed = FailedWorkers(failure)
        self.failed.note(failure, workers)

    def is_to_blame(self, max_deaths: float) -> bool:
        """Return whether the request has ended more workers, or caused its failure."""
        return self.failed is not None and (self.failed.num_deaths > max_deaths or self.failed.is_own)

    def fails_by_itself(self, placements: Sequence[Placement] = ()) -> bool:
        """Return whether it caused its failure, or trying `placements` would prove nothing."""
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


def milliseconds(headers: Mapping[str, str], name: str) -> float | None:
    """A header's milliseconds as seconds. Raises BadBody."""
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


# ---- Parts of a request (set in router/compose/).

Serve = Callable[[RequestContext], Awaitable[Response]]
ServePart = Callable[[RequestContext, Serve], Awaitable[Response]]  # surrounds the service
CallPart = Callable[["PromptCall"], None]  # changes the call of an attempt before it is sent


class BodyPart(Protocol):
    """Changes bodies before the request is routed."""

    @property
    def apis(self) -> Iterable[Api]: ...

    @property
    def needles(self) -> Sequence[bytes]:
        """A body must contain one of these texts; empty for any body."""

    async def prepare(self, request: RequestContext) -> ParsedBody:
        """The body for routing. Raises ApiError."""


class PromptCall(msgspec.Struct, kw_only=True, eq=False):
    """The call of an attempt to the worker that computes the prompt, before it is sent.

    `leases` charge further workers until the prompt is computed.
    """

    request: RequestContext
    placement: Placement
    headers: Mapping[str, str]
    now_s: float
    leases: list[Lease] = []


class AnswerPart(Protocol):
    """Gets an answer before the client, and may change it. `close` always follows."""

    def on_answer(self, body: bytes) -> bytes: ...
    def on_events(self, events: bytes) -> bytes: ...
    def close(self) -> None: ...


# ---- The events of a request and their receivers (set in router/compose/).


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    # The body was read, and workers may serve it.
    on_routed: tuple[Callable[[RequestContext], None], ...] = ()
    # An attempt was charged to its workers and sent.
    on_sent: tuple[Callable[[RequestContext, PairAttempt, float], None], ...] = ()
    # The answer of this attempt begins.
    on_first_byte: tuple[Callable[[RequestContext, PairAttempt, float], None], ...] = ()
    # A further piece of a stream came; `request.last_byte_s` is still the time of the one before.
    on_chunk: tuple[Callable[[RequestContext, PairAttempt, bytes, float], None], ...] = ()
    # An attempt failed before its answer began; `on_call_failed` follows.
    on_attempt_failed: tuple[Callable[[RequestContext, PairAttempt, CallFailed, float], None], ...] = ()
    # A worker failed, whether or not that ends the attempt.
    on_call_failed: tuple[Callable[[CallFailed, float], None], ...] = ()
    # The request goes to other workers.
    on_retry: tuple[Callable[[CallFailed], None], ...] = ()
    # The worker of a stream was lost, and its answer goes on at others or not.
    on_failover: tuple[Callable[[CallFailed, PairAttempt | None], None], ...] = ()
    # These roles have no worker for the request.
    on_no_worker: tuple[Callable[[list[Role]], None], ...] = ()
    # The client no longer needs this attempt; it is still charged to its workers.
    on_attempt_ended: tuple[Callable[[PairAttempt, float], None], ...] = ()
    # The prefill call has ended, too, now or after the attempt.
    on_prefill_ended: tuple[Callable[[PairAttempt, float], None], ...] = ()
    # The request was answered; 499: its client went away.
    on_ended: tuple[Callable[[RequestContext, int, float], None], ...] = ()
    # A request was refused before it was sent anywhere.
    on_refused: tuple[Callable[[str], None], ...] = ()
