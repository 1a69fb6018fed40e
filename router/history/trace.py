"""Traces of requests, for `tandem trace`, log lines and the dashboard. Times are monotonic
seconds.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from router.attempts.pair_attempt import PairAttempt
from router.attempts.request import RequestContext
from router.attempts.upstream_call import CallFailed, UpstreamCall
from router.history.recorder import DashboardAttempt, DashboardRequest, Recorder
from router.pool.worker import Worker
from service.http.errors import decode_or_none
from service.http.guard import CLIENT_GONE
from service.telemetry.context import OPERATIONS, about
from service.telemetry.records import Record, Span, SpanContext, Tracer, unix_offset_s

log = logging.getLogger(__name__)

MAX_MODEL_BYTES = 256  # longest value of a client
MAX_ROOMS = 16  # likewise
MAX_ID_CHARS = 128  # shown on the dashboard
MAX_FAILURE_CHARS = 300


@dataclass(eq=False)
class RequestTraces:
    """Traces of running requests. `log_requests`: log each end (--log-requests)."""

    tracer: Tracer
    recorder: Recorder
    log_requests: bool = False
    _running: dict[RequestContext, "RequestTrace"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._exports = self.tracer.exports

    def on_routed(self, request: RequestContext) -> None:
        trace = self._running[request] = self._begin(request)
        trace.outcome.key = self.recorder.begin(trace, request.started_s)

    def on_sent(self, request: RequestContext, attempt: PairAttempt, now_s: float) -> None:
        self._running[request].add(attempt)

    def on_attempt_failed(
        self, request: RequestContext, attempt: PairAttempt, failure: CallFailed, now_s: float
    ) -> None:
        shown = self._running[request].attempts[attempt]
        shown.failure, shown.failed_s = str(failure)[:MAX_FAILURE_CHARS], now_s

    def on_ended(self, request: RequestContext, status: int, now_s: float) -> None:
        trace = self._running.pop(request, None)
        if trace is None:  # its body was invalid
            trace = self._begin(request)
        trace.end(status, now_s)
        if trace.outcome.key:
            failed = status >= 500 or (status < 400 and bool(request.failure))
            self.recorder.end(trace, trace.outcome.key, failed=failed, now_s=now_s)
        if trace.span is None:
            self.tracer.ring.add(request.request_id, trace.record)
        else:
            self.tracer.add(request.request_id, trace.record, span=trace.span)
        if self.log_requests:
            trace.log()

    def _begin(self, request: RequestContext) -> "RequestTrace":
        span = None
        if self._exports:
            span = self.tracer.span_under(request.http.headers.get("traceparent", ""))
            if span is not None:
                request.headers = {**request.headers, "traceparent": span.at.header()}
        return RequestTrace(request, span)


class _PastCall(msgspec.Struct, frozen=True):
    """A finished call; `error` is empty on success."""

    worker: Worker
    sent_s: float
    over_s: float
    error: str


class RequestTrace:
    """A request's attempts, at its end only the outcome, without bodies."""

    def __init__(self, request: RequestContext, span: SpanContext | None) -> None:
        parsed = request.parsed
        self.span = span
        self.attempts: dict[PairAttempt, DashboardAttempt] = {}  # while it runs
        self.past: list[_PastCall] = []  # after that
        self.rooms: Sequence[int] = ()  # of the last attempt
        self.outcome = DashboardRequest(
            key="",
            request_id=request.request_id[:MAX_ID_CHARS],
            path=request.path,
            started_s=request.started_s,
            prompt_tokens=parsed.prompt_tokens,
            attempts=[],
            caller=request.caller,
        )
        self._request: RequestContext | None = request
        self._request_id = request.request_id
        self._num_samples = parsed.num_samples
        self._model = bytes(parsed.fields.get("model", b""))[:MAX_MODEL_BYTES]

    def add(self, attempt: PairAttempt) -> None:
        prefill = None if attempt.prefill is None else attempt.prefill.worker.url
        shown = DashboardAttempt(attempt.started_s, attempt.answering.worker.url, prefill)
        self.attempts[attempt] = shown
        self.outcome.attempts.append(shown)
        self.rooms = attempt.rooms[:MAX_ROOMS]
        self.outcome.rooms += self.rooms

    def end(self, status: int, now_s: float) -> None:
        outcome, request = self.shown(), self._request
        for attempt, shown in self.attempts.items():
            past = [_past(call, attempt.started_s, now_s) for call in attempt.calls]
            if attempt.prefill is not None:
                shown.prefill_ended_s = past[0].over_s
            self.past += past
        self.attempts, self._request = {}, None
        outcome.ended_s, outcome.status = now_s, status
        if request is not None and request.first_byte_s is not None:
            outcome.last_byte_s = request.last_byte_s
        if outcome.key and status >= 400 and not outcome.failure:
            gone = "the client went away" if status == CLIENT_GONE else f"HTTP {status}"
            outcome.failure = (outcome.attempts[-1].failure if outcome.attempts else "") or gone

    def shown(self) -> DashboardRequest:
        outcome, request = self.outcome, self._request
        if request is not None:
            outcome.first_byte_s, outcome.num_events = request.first_byte_s, request.num_chunks
            outcome.failure = request.failure[:MAX_FAILURE_CHARS]
        for attempt, shown in self.attempts.items():
            if attempt.prefill is not None and attempt.prefill.ended:
                shown.prefill_ended_s = max(attempt.started_s, attempt.prefill.reply.received_s)
        return outcome

    def record(self) -> Record:
        wall, outcome = unix_offset_s(), self.outcome
        ended_s = (outcome.ended_s or outcome.started_s) + wall
        spans = [
            Span(
                name=f"{past.worker.role.value} leg",
                start_s=past.sent_s + wall,
                end_s=past.over_s + wall,
                attributes={"url.full": past.worker.url, **({"error.type": past.error} if past.error else {})},
            )
            for past in self.past
        ]
        if outcome.first_byte_s is not None:
            spans.append(Span(name="answer", start_s=outcome.first_byte_s + wall, end_s=ended_s))
        return Record(
            request_id=self._request_id,
            process="router",
            operation=OPERATIONS.get(outcome.path, ""),
            model=decode_or_none(self._model, str) or "",
            start_s=outcome.started_s + wall,
            end_s=ended_s,
            error=str(outcome.status) if outcome.status >= 400 else "",
            attributes=self._attributes(),
            spans=spans,
        )

    @property
    def _ttfb_s(self) -> float | None:
        first_byte_s = self.outcome.first_byte_s
        return None if first_byte_s is None else first_byte_s - self.outcome.started_s

    def _attributes(self) -> dict[str, str | int | float]:
        outcome = self.outcome
        found: dict[str, str | int | float] = {"url.path": outcome.path, "http.response.status_code": outcome.status}
        if self._num_samples:
            found["gen_ai.request.choice.count"] = self._num_samples
        if self.rooms:
            found["tandem.bootstrap_room"] = ",".join(map(str, self.rooms))
        if self._ttfb_s is not None:
            found["gen_ai.response.time_to_first_chunk"] = self._ttfb_s
        return found

    def log(self) -> None:
        workers = " ".join(past.worker.url for past in self.past)
        path, status = self.outcome.path, self.outcome.status
        taken_s = (self.outcome.ended_s or self.outcome.started_s) - self.outcome.started_s
        fields = about(
            request_id=self._request_id,
            path=path,
            status=status,
            duration_s=round(taken_s, 6),
            ttfb_s=-1.0 if self._ttfb_s is None else round(self._ttfb_s, 6),
            room=str(self.rooms[0]) if self.rooms else "",
            workers=workers,
        )
        log.info("%s %d %.3fs %s to %s", path, status, taken_s, self._request_id, workers or "none", extra=fields)


def _past(call: UpstreamCall, sent_s: float, now_s: float) -> _PastCall:
    reply = call.reply
    over_s = min(reply.received_s, now_s) if call.ended else now_s
    error = "" if reply.error is None else reply.error.reason
    if not error and reply.status >= 400:
        error = str(reply.status)
    return _PastCall(call.worker, sent_s, max(sent_s, over_s), error)
