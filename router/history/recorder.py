"""Remembers the last requests and the last two minutes, by the second. Owns both; is told what happens, decides nothing.

It stands in the way of every request and of every event of a stream, so each call does little, and all of it is bounded.
What a request was is known by its journey (router/requests/journey.py), which tells it when somebody looks.
Pure but for the clock that it is given, for what is told without a time.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from router.history.quantiles import bucket_of
from router.history.records import Record, Second, Snapshot
from router.pool.worker import LoadReport, Role

KEPT_REQUESTS = 256  # that have ended
MAX_RUNNING = 512  # that run and are remembered; more are only counted
KEPT_SECONDS = 120


class Watched(Protocol):
    """One request, under way or over."""

    def shown(self) -> Record: ...


class Recorder:
    """`place`: which of the router's processes this is. `now_s`: the clock."""

    def __init__(self, now_s: Callable[[], float], *, place: int = 0) -> None:
        self.now_s = now_s
        self._place = place
        self._serial = 0
        self._running: dict[str, Watched] = {}
        self._ended: deque[Watched] = deque(maxlen=KEPT_REQUESTS)
        self._seconds: deque[Second] = deque([Second(int(now_s()))], maxlen=KEPT_SECONDS)

    def begin(self, request: Watched, now_s: float) -> str:
        """A request that was read; its key, unique among all processes."""
        self._serial += 1
        key = f"{self._place}-{self._serial}"
        self.second(now_s).arrived += 1
        if len(self._running) < MAX_RUNNING:
            self._running[key] = request
        return key

    def second(self, now_s: float) -> Second:
        """The one that runs. Times of requests are told a little late, of seconds that are over: those count for the last."""
        at, last = int(now_s), self._seconds[-1]
        if at > last.at:
            last = Second(at)
            self._seconds.append(last)
        return last

    def count_ttft(self, seconds: float, now_s: float) -> None:
        counts, bucket = self.second(now_s).ttft, bucket_of(seconds)
        counts[bucket] = counts.get(bucket, 0) + 1

    def count_gap(self, seconds: float, now_s: float) -> None:
        counts, bucket = self.second(now_s).gaps, bucket_of(seconds)
        counts[bucket] = counts.get(bucket, 0) + 1

    def on_failure(self, reason: str, role: str) -> None:
        """A worker failed a request, which may go well on another one."""
        failures, name = self.second(self.now_s()).failures, f"{role} {reason}"
        failures[name] = failures.get(name, 0) + 1

    def on_end(self, request: Watched, key: str, *, failed: bool, now_s: float) -> None:
        self._running.pop(key, None)
        self._ended.append(request)
        second = self.second(now_s)
        second.ended += 1
        second.failed += failed

    def on_report(self, role: Role, before: LoadReport | None, report: LoadReport | None) -> None:
        """What a worker reports now, and what it reported before. A counter that fell is a new process's."""
        if before is None or report is None:
            return
        second = self.second(self.now_s())
        if role is not Role.DECODE:
            second.prompt_tokens += max(0, report.prompt_tokens_total - before.prompt_tokens_total)
            second.kv_bytes += max(0, report.kv_bytes_total - before.kv_bytes_total)
        if role is not Role.PREFILL:
            second.output_tokens += max(0, report.output_tokens_total - before.output_tokens_total)

    def snapshot(self) -> Snapshot:
        return Snapshot([*self._seconds], [request.shown() for request in (*self._ended, *self._running.values())])
