"""The last requests, their traces, and counts per second for two minutes.

Latencies are counts in buckets of ratio 1.125: quantiles within 6 %, and sums over processes
(DDSketch, Masson, Rim and Lee, VLDB 2019). Times are monotonic seconds.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from router.attempts.pair_attempt import PairAttempt
from router.attempts.request import RequestContext
from router.attempts.upstream_call import CallFailed, UpstreamCall
from router.choice.where import Decision
from router.pool.worker import LoadReport, Role, Worker
from service.http.errors import decode_or_none
from service.http.guard import CLIENT_GONE
from service.telemetry.context import OPERATIONS, Record, Span, SpanContext, Tracer, about, unix_offset_s


class Second(msgspec.Struct):
    """Events of a second: latencies by bucket (recorder.py), `failures` by "role reason"."""

    at: int
    arrived: int = 0
    ended: int = 0
    failed: int = 0
    retried: int = 0
    ttft: dict[int, int] = msgspec.field(default_factory=dict)
    gaps: dict[int, int] = msgspec.field(default_factory=dict)
    failures: dict[str, int] = msgspec.field(default_factory=dict)
    # Increases between reports, not summed, as all processes receive the same.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    kv_bytes: int = 0


class DashboardAttempt(msgspec.Struct):
    """`answering`: decode, unified, or a prefill worker without decode."""

    started_s: float
    answering: str
    prefill: str | None = None
    prefill_ended_s: float | None = None
    failure: str = ""
    failed_s: float | None = None


class DashboardRequest(msgspec.Struct):
    """`status`: 0 while running, 499 if its client left."""

    key: str  # unique among all processes
    request_id: str
    path: str
    started_s: float
    prompt_tokens: int  # estimated
    attempts: list[DashboardAttempt]
    first_byte_s: float | None = None
    last_byte_s: float | None = None
    num_events: int = 0  # chunks of a streamed answer
    ended_s: float | None = None
    status: int = 0
    failure: str = ""
    caller: str = ""  # name of its API key
    model: str = ""  # as the client named it
    rooms: list[int] = []  # all its attempts'


class DashboardSnapshot(msgspec.Struct):
    """Records of one process. `switching`: URL -> new role."""

    seconds: list[Second]
    records: list[DashboardRequest]
    switching: dict[str, str] = {}


KEPT_REQUESTS = 256  # finished ones
MAX_RUNNING = 512  # running ones; further ones are only counted
KEPT_SECONDS = 120

MIN_S = 1e-5
GROWTH = 1.125
MAX_BUCKET = 160  # about 1,500 s
_PER_LOG = 1 / math.log(GROWTH)
_log = math.log

Counted = TypeVar("Counted")


class Recorder:
    def __init__(self, now_s: Callable[[], float], *, place: int = 0) -> None:
        self.now_s = now_s
        self._place = place
        self._serial = 0
        self._running: dict[str, RequestTrace] = {}
        self._ended: deque[RequestTrace] = deque(maxlen=KEPT_REQUESTS)
        self._seconds: deque[Second] = deque([Second(int(now_s()))], maxlen=KEPT_SECONDS)

    def begin(self, request: "RequestTrace", now_s: float) -> str:
        """Return its key, unique among processes."""
        self._serial += 1
        key = f"{self._place}-{self._serial}"
        self.second(now_s).arrived += 1
        if len(self._running) < MAX_RUNNING:
            self._running[key] = request
        return key

    def end(self, request: "RequestTrace", key: str, *, failed: bool, now_s: float) -> None:
        self._running.pop(key, None)
        self._ended.append(request)
        second = self.second(now_s)
        second.ended += 1
        second.failed += failed

    def second(self, now_s: float) -> Second:
        at, last = int(now_s), self._seconds[-1]
        if at > last.at:
            last = Second(at)
            self._seconds.append(last)
        return last

    def on_sent(self, request: RequestContext, attempt: PairAttempt, now_s: float) -> None:
        if request.failed is not None:
            self.second(now_s).retried += 1

    def on_first_byte(self, request: RequestContext, attempt: PairAttempt, now_s: float) -> None:
        counts, bucket = self.second(now_s).ttft, bucket_of(now_s - request.started_s)
        counts[bucket] = counts.get(bucket, 0) + 1

    def on_chunk(self, request: RequestContext, attempt: PairAttempt, chunk: bytes, now_s: float) -> None:
        counts, bucket = self.second(now_s).gaps, bucket_of(now_s - request.last_byte_s)
        counts[bucket] = counts.get(bucket, 0) + 1

    def on_call_failed(self, failure: CallFailed, now_s: float) -> None:
        add(self.second(now_s).failures, {f"{failure.worker.role.value} {failure.label}": 1})

    def on_no_worker(self, missing: list[Role]) -> None:
        add(self.second(self.now_s()).failures, {f"{','.join(missing)} no_worker": 1})

    def on_report(self, role: Role, before: LoadReport | None, report: LoadReport | None) -> None:
        """Add a report's increase. A counter that fell is a new process's."""
        if before is None or report is None or role is Role.ENCODE:
            return
        second = self.second(self.now_s())
        if role is not Role.DECODE:
            second.prompt_tokens += max(0, report.prompt_tokens_total - before.prompt_tokens_total)
            second.cached_tokens += max(0, report.cached_tokens_total - before.cached_tokens_total)
            second.kv_bytes += max(0, report.kv_bytes_total - before.kv_bytes_total)
        if role is not Role.PREFILL:
            second.output_tokens += max(0, report.output_tokens_total - before.output_tokens_total)

    def snapshot(self) -> DashboardSnapshot:
        requests = (*self._ended, *self._running.values())
        return DashboardSnapshot([*self._seconds], [request.shown() for request in requests])


def bucket_of(seconds: float) -> int:
    return min(MAX_BUCKET, int(_log(seconds / MIN_S) * _PER_LOG)) if seconds > MIN_S else 0


def add(into: dict[Counted, int], counts: Mapping[Counted, int]) -> None:
    for what, count in counts.items():
        into[what] = into.get(what, 0) + count


def quantile(counts: Mapping[int, int], share: float) -> float | None:
    total = sum(counts.values())
    if not total:
        return None
    wanted, seen = max(1, math.ceil(share * total)), 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= wanted:
            return float(MIN_S * GROWTH ** (bucket + 0.5))
    raise AssertionError("the counts add up to the total")


# ---- Traces of requests, for `tandem trace`, log lines and the dashboard. Times are monotonic
# seconds.

log = logging.getLogger(__name__)

MAX_MODEL_BYTES = 256  # longest value of a client
MAX_ROOMS = 16  # likewise
MAX_ID_CHARS = 128  # shown on the dashboard
MAX_FAILURE_CHARS = 300


@dataclass(eq=False)
class RequestTraces:
    """`log_requests`: log each end (--log-requests)."""

    tracer: Tracer
    recorder: Recorder
    log_requests: bool = False
    _running: dict[RequestContext, "RequestTrace"] = field(default_factory=dict)

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
        span = self.tracer.span_under(request.http.headers.get("traceparent", ""))
        if span is not None:
            request.headers = {**request.headers, "traceparent": span.at.header()}
        return RequestTrace(request, span)


class _PastCall(msgspec.Struct, frozen=True):
    worker: Worker
    sent_s: float
    over_s: float
    error: str


class RequestTrace:
    """A request's attempts, at its end only the outcome, without bodies."""

    def __init__(self, request: RequestContext, span: SpanContext | None) -> None:
        parsed = request.parsed
        model = bytes(parsed.fields.get("model", b""))[:MAX_MODEL_BYTES]
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
            model=(decode_or_none(model, str) or "") if model else "",
        )
        self._request: RequestContext | None = request
        self._request_id = request.request_id
        self._num_samples = parsed.num_samples
        self._decision: Decision | None = None

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
        self._decision = None if request is None else request.decision
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
            model=outcome.model,
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
        if self._decision is not None:
            found |= _reasons(self._decision)
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


def _reasons(decision: Decision) -> dict[str, str | int | float]:
    """The chosen route, the parts of its price in seconds, and the cheapest of another route."""
    chosen, runner_up = decision.chosen, decision.runner_up
    found: dict[str, str | int | float] = {"tandem.route": chosen.route, "tandem.route.cached_tokens": chosen.cached}
    found |= {f"tandem.route.price.{part}": round(s, 6) for part, s in decision.price._asdict().items()}
    if chosen.source is not None:
        found["tandem.route.fetched_tokens"] = chosen.source.missing
        found["tandem.route.fetched_from"] = "store" if chosen.source.from_store else "worker"
    if runner_up is not None:
        found |= {"tandem.route.runner_up": runner_up.route, "tandem.route.runner_up_s": round(decision.runner_up_s, 6)}
    return found


def _past(call: UpstreamCall, sent_s: float, now_s: float) -> _PastCall:
    reply = call.reply
    over_s = min(reply.received_s, now_s) if call.ended else now_s
    error = "" if reply.error is None else reply.error.reason
    if not error and reply.status >= 400:
        error = str(reply.status)
    return _PastCall(call.worker, sent_s, max(sent_s, over_s), error)
