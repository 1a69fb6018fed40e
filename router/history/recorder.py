"""The last requests, and counts per second for two minutes. Pure but for its clock.

Latencies are counts in buckets of ratio 1.125: quantiles within 6 %, and sums over processes
(DDSketch, Masson, Rim and Lee, VLDB 2019). Times are monotonic seconds.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import msgspec

from router.attempts.pair_attempt import PairAttempt
from router.attempts.request import RequestContext
from router.attempts.upstream_call import CallFailed
from router.pool.worker import LoadReport, Role


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
    output_tokens: int = 0
    kv_bytes: int = 0


class DashboardAttempt(msgspec.Struct):
    """One attempt. `answering`: decode, unified, or a prefill worker without decode."""

    started_s: float
    answering: str
    prefill: str | None = None
    prefill_ended_s: float | None = None
    failure: str = ""
    failed_s: float | None = None


class DashboardRequest(msgspec.Struct):
    """One request. `status`: 0 while running, 499 if its client left."""

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


class Watched(Protocol):
    def shown(self) -> DashboardRequest: ...


class Recorder:
    def __init__(self, now_s: Callable[[], float], *, place: int = 0) -> None:
        self.now_s = now_s
        self._place = place
        self._serial = 0
        self._running: dict[str, Watched] = {}
        self._ended: deque[Watched] = deque(maxlen=KEPT_REQUESTS)
        self._seconds: deque[Second] = deque([Second(int(now_s()))], maxlen=KEPT_SECONDS)

    def begin(self, request: Watched, now_s: float) -> str:
        """Record a request; return its key, unique among processes."""
        self._serial += 1
        key = f"{self._place}-{self._serial}"
        self.second(now_s).arrived += 1
        if len(self._running) < MAX_RUNNING:
            self._running[key] = request
        return key

    def end(self, request: Watched, key: str, *, failed: bool, now_s: float) -> None:
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
            second.kv_bytes += max(0, report.kv_bytes_total - before.kv_bytes_total)
        if role is not Role.PREFILL:
            second.output_tokens += max(0, report.output_tokens_total - before.output_tokens_total)

    def snapshot(self) -> DashboardSnapshot:
        return DashboardSnapshot(
            [*self._seconds], [request.shown() for request in (*self._ended, *self._running.values())]
        )


def bucket_of(seconds: float) -> int:
    return min(MAX_BUCKET, int(_log(seconds / MIN_S) * _PER_LOG)) if seconds > MIN_S else 0


def middle_of(bucket: int) -> float:
    return float(MIN_S * GROWTH ** (bucket + 0.5))


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
            return middle_of(bucket)
    raise AssertionError("the counts add up to the total")
