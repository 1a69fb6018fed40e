"""One client's request while it is served: what was read of it, what was decided, how far its answer is. Data."""

import asyncio
import math
from collections.abc import Callable, Mapping

import msgspec
from aiohttp import web

from router.attempts.deadline import less_time
from router.attempts.failed_workers import FailedWorkers
from router.body import Api, ParsedBody
from router.choice.policies import RoutingHints
from router.pool.worker import Role

TTFT_HEADER = "x-slo-ttft-ms"
ITL_HEADER = "x-slo-itl-ms"


class Slo(msgspec.Struct, frozen=True):
    """Objectives of one request, in seconds; inf: none."""

    ttft_s: float = math.inf
    itl_s: float = math.inf


UNREAD = ParsedBody(
    api=Api.GENERATE,
    fields={},
    num_prompts=0,
    num_samples=0,
    prompt_tokens=0,
    output_tokens=0,
    wants_input_logprobs=False,
)
NO_HINTS = RoutingHints()


class RequestContext(msgspec.Struct, kw_only=True, eq=False):
    """One request from its arrival to the end of its answer. Times are the router's clock."""

    http: web.BaseRequest
    task: "asyncio.Task[object]"
    request_id: str
    path: str
    started_s: float

    # Read of the body and the headers.
    body: bytes = b""
    parsed: ParsedBody = UNREAD
    hints: RoutingHints = NO_HINTS
    slo: Slo | None = None  # None: no objectives
    hedge_after_s: float | None = None  # silence after which a second attempt begins; None: never
    roles: tuple[Role, ...] = ()
    model: str = ""  # that its workers must serve; "": any
    traceparent: str = ""  # sent to workers; "": the client's
    headers: Mapping[str, str] = {}  # sent to workers

    # So far.
    failed: FailedWorkers | None = None  # None: no attempt has failed
    first_byte_s: float | None = None
    last_byte_s: float = 0.0
    num_chunks: int = 0
    failure: str = ""  # why the answer ended early, after its status had left
    handed_back: bool = False
    cut: Callable[[], None] | None = None  # closes the stream that the answer is read from

    def headers_at(self, now_s: float) -> Mapping[str, str]:
        """The headers of an attempt that begins then: less of the client's time is left."""
        return less_time(self.headers, now_s - self.started_s)

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


def read_slo(headers: Mapping[str, str], default: Slo) -> Slo:
    """Read the objectives of one request, else the router's. `ValueError` names the header that is no positive number."""
    return Slo(_seconds(headers, TTFT_HEADER, default.ttft_s), _seconds(headers, ITL_HEADER, default.itl_s))


def _seconds(headers: Mapping[str, str], name: str, default_s: float) -> float:
    text = headers.get(name)
    if text is None:
        return default_s
    try:
        value_s = float(text) / 1000
    except ValueError:
        value_s = 0.0
    if not 0.0 < value_s < math.inf:
        raise ValueError(f"{name}: must be a number of milliseconds above 0, got {text[:40]!r}")
    return value_s
