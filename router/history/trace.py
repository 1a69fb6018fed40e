"""The trace of one request: its workers, times and outcome. Times are monotonic seconds.

The record for `tandem trace` (service/telemetry/records.py), the log line and the dashboard's record (records.py) are made of
it, the first and the last only when they are read.
"""

import logging
from collections.abc import Sequence

import msgspec

from router.attempts.events import RequestObserver
from router.attempts.pair_attempt import PairAttempt
from router.attempts.request import RequestContext
from router.attempts.upstream_call import CallFailed, UpstreamCall
from router.history.recorder import Recorder
from router.history.records import DashboardAttempt, DashboardRequest
from router.pool.worker import Worker
from service.http.guard import CLIENT_GONE
from service.http.json_depth import decode_or_none
from service.telemetry.context import OPERATIONS
from service.telemetry.logs import about
from service.telemetry.records import Record, Span
from service.telemetry.tracer import SpanContext, Tracer, unix_offset_s

log = logging.getLogger(__name__)

MAX_MODEL_BYTES = 256  # kept of what a client may send
MAX_ROOMS = 16  # likewise
MAX_ID_CHARS = 128  # shown on the dashboard
MAX_FAILURE_CHARS = 300


class RequestTraces(RequestObserver):
    """Keeps a trace of each request under way. `log_requests`: log a line when one ends (--log-requests)."""

    def __init__(self, tracer: Tracer, recorder: Recorder, *, log_requests: bool = False) -> None:
        self._tracer = tracer
        self._exports = tracer.exports
        self._recorder = recorder
        self._log_requests = log_requests
        self._running: dict[RequestContext, RequestTrace] = {}

    def on_routed(self, request: RequestContext) -> None:
        trace = self._running[request] = self._begin(request)
        trace.key = self._recorder.begin(trace, request.started_s)

    def on_sent(self, request: RequestContext, attempt: PairAttempt, now_s: float) -> None:
        self._running[request].attempts.append(AttemptTrace(attempt))

    def on_attempt_failed(
        self, request: RequestContext, attempt: PairAttempt, failure: CallFailed, now_s: float
    ) -> None:
        for trace in self._running[request].attempts:
            if trace.attempt is attempt:
                trace.failure, trace.failed_s = str(failure)[:MAX_FAILURE_CHARS], now_s

    def on_ended(self, request: RequestContext, status: int, now_s: float) -> None:
        trace = self._running.pop(request, None)
        if trace is None:  # it could not be read
            trace = self._begin(request)
        trace.end(request, status, now_s)
        if trace.key:
            failed = status >= 500 or (status < 400 and bool(request.failure))
            self._recorder.end(trace, trace.key, failed=failed, now_s=now_s)
        if trace.span is None:
            self._tracer.ring.add(request.request_id, trace.record)
        else:
            self._tracer.add(request.request_id, trace.record, span=trace.span)
        if self._log_requests:
            trace.log()

    def _begin(self, request: RequestContext) -> "RequestTrace":
        span = None
        if self._exports:
            span = self._tracer.span_under(request.http.headers.get("traceparent", ""))
            if span is not None:
                request.traceparent = span.at.header()
        return RequestTrace(request, span)


class _PastCall(msgspec.Struct, frozen=True):
    """A call that is over. `error`: what went wrong ("": nothing)."""

    worker: Worker
    over_s: float
    error: str


class AttemptTrace:
    """One attempt: itself while the request runs; after that the outcome of its calls, without their bytes."""

    def __init__(self, attempt: PairAttempt) -> None:
        self.attempt: PairAttempt | None = attempt
        self.started_s = attempt.started_s
        self.hedge = attempt.hedge
        self.rooms = attempt.rooms[:MAX_ROOMS]
        self.past: Sequence[_PastCall] = ()
        self.failure = ""
        self.failed_s: float | None = None
        self.cancelled_s: float | None = None

    def settle(self, now_s: float) -> None:
        """Drop the calls: they hold the worker's answer and the client's request."""
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            self.past = [_past(call, self.started_s, now_s) for call in attempt.calls]
            self.cancelled_s = _cancelled_s(attempt)

    def shown(self) -> DashboardAttempt:
        attempt = self.attempt
        workers = [past.worker for past in self.past] if attempt is None else attempt.workers
        prefill = workers[0].url if len(workers) > 1 else None
        return DashboardAttempt(
            self.started_s,
            workers[-1].url,
            prefill,
            self._prefill_ended_s() if prefill else None,
            self.failure,
            self.failed_s,
            self.hedge,
            self.cancelled_s if attempt is None else _cancelled_s(attempt),
        )

    def _prefill_ended_s(self) -> float | None:
        """When the prefill call ended; None: it still runs."""
        if self.past:
            return self.past[0].over_s
        prefill = None if self.attempt is None else self.attempt.prefill
        return max(self.started_s, prefill.reply.received_s) if prefill is not None and prefill.ended else None


class RequestTrace:
    """`key`: on the dashboard; "": the request could not be read."""

    def __init__(self, request: RequestContext, span: SpanContext | None) -> None:
        parsed = request.parsed
        self.span = span
        self.key = ""
        self.attempts: list[AttemptTrace] = []
        self._request: RequestContext | None = request
        self._request_id = request.request_id
        self._path = request.path
        self._started_s = request.started_s
        self._num_samples = parsed.num_samples
        self._prompt_tokens = parsed.prompt_tokens
        self._model = bytes(parsed.fields.get("model", b""))[:MAX_MODEL_BYTES]
        self._first_byte_s: float | None = None
        self._ended_s: float | None = None
        self._last_byte_s = 0.0
        self._num_chunks = self._status = 0
        self._failure = ""

    def end(self, request: RequestContext, status: int, now_s: float) -> None:
        """Keep the outcome, not the request."""
        self._read(request)
        self._request = None
        self._ended_s, self._status = now_s, status
        for attempt in self.attempts:
            attempt.settle(now_s)
        if self.key and status >= 400 and not self._failure:
            gone = "the client went away" if status == CLIENT_GONE else f"HTTP {status}"
            self._failure = _last_failure(self.attempts) or gone

    def _read(self, request: RequestContext) -> None:
        self._first_byte_s, self._last_byte_s = request.first_byte_s, request.last_byte_s
        self._num_chunks, self._failure = request.num_chunks, request.failure[:MAX_FAILURE_CHARS]

    def shown(self) -> DashboardRequest:
        if self._request is not None:
            self._read(self._request)
        ended = self._ended_s is not None and self._first_byte_s is not None
        return DashboardRequest(
            key=self.key,
            request_id=self._request_id[:MAX_ID_CHARS],
            path=self._path,
            started_s=self._started_s,
            prompt_tokens=self._prompt_tokens,
            attempts=[attempt.shown() for attempt in self.attempts],
            first_byte_s=self._first_byte_s,
            last_byte_s=self._last_byte_s if ended else None,
            num_events=self._num_chunks,
            ended_s=self._ended_s,
            status=self._status,
            failure=self._failure,
        )

    def record(self) -> Record:
        """For `tandem trace` and the collector."""
        wall, ended_s = unix_offset_s(), self._end_s
        calls = [
            Span(
                name=f"{past.worker.role.value} leg",
                start_s=attempt.started_s + wall,
                end_s=past.over_s + wall,
                attributes={"url.full": past.worker.url, **({"error.type": past.error} if past.error else {})},
            )
            for attempt in self.attempts
            for past in attempt.past
        ]
        answer = []
        if self._first_byte_s is not None:
            answer = [Span(name="answer", start_s=self._first_byte_s + wall, end_s=ended_s + wall)]
        return Record(
            request_id=self._request_id,
            process="router",
            operation=OPERATIONS.get(self._path, ""),
            model=decode_or_none(self._model, str) or "",
            start_s=self._started_s + wall,
            end_s=ended_s + wall,
            error=str(self._status) if self._status >= 400 else "",
            attributes=self._attributes(),
            spans=calls + answer,
        )

    @property
    def _end_s(self) -> float:
        return self._started_s if self._ended_s is None else self._ended_s

    @property
    def _rooms(self) -> Sequence[int]:
        return self.attempts[-1].rooms if self.attempts else ()

    def _attributes(self) -> dict[str, str | int | float]:
        found: dict[str, str | int | float] = {"url.path": self._path, "http.response.status_code": self._status}
        if self._num_samples:
            found["gen_ai.request.choice.count"] = self._num_samples
        if self._rooms:
            found["tandem.bootstrap_room"] = ",".join(map(str, self._rooms))
        if self._first_byte_s is not None:
            found["gen_ai.response.time_to_first_chunk"] = self._first_byte_s - self._started_s
        return found

    def log(self) -> None:
        workers = " ".join(past.worker.url for attempt in self.attempts for past in attempt.past)
        taken_s = self._end_s - self._started_s
        fields = about(
            request_id=self._request_id,
            path=self._path,
            status=self._status,
            duration_s=round(taken_s, 6),
            ttfb_s=-1.0 if self._first_byte_s is None else round(self._first_byte_s - self._started_s, 6),
            room=str(self._rooms[0]) if self._rooms else "",
            workers=workers,
        )
        text = "%s %d %.3fs %s to %s"
        log.info(text, self._path, self._status, taken_s, self._request_id, workers or "none", extra=fields)


def _past(call: UpstreamCall, sent_s: float, now_s: float) -> _PastCall:
    """A call that still runs is over for the client."""
    reply = call.reply
    over_s = min(reply.received_s, now_s) if call.ended else now_s
    error = "" if reply.error is None else reply.error.reason
    if not error and reply.status >= 400:
        error = str(reply.status)
    return _PastCall(call.worker, max(sent_s, over_s), error)


def _cancelled_s(attempt: PairAttempt) -> float | None:
    """When another attempt answered first."""
    return attempt.ended_s if attempt.cancelled else None


def _last_failure(attempts: Sequence[AttemptTrace]) -> str:
    """Of the last attempt, or of the one beside it if that is a hedge."""
    last = attempts[-2:] if attempts and attempts[-1].hedge else attempts[-1:]
    return next((attempt.failure for attempt in last if attempt.failure), "")
