"""Remembers the last requests and the last two minutes, by the second. Owns both; is told what happens, decides nothing.

It stands in the way of every request and of every event of a stream, so each call does little, and all of it is bounded.
Pure but for the clock that it is given.
"""

from collections import deque
from collections.abc import Callable

from router.dashboard.quantiles import bucket_of
from router.dashboard.records import Attempt, Record, Second, Snapshot
from router.pool.workers import LoadReport, Role

KEPT_REQUESTS = 256  # that have ended
MAX_RUNNING = 512  # that run and are remembered; more are only counted
KEPT_SECONDS = 120
MAX_ID_CHARS = 128
MAX_FAILURE_CHARS = 300
GONE = 499  # the client went away


class Watched:
    """One request under way. Every method may be called at any time, the last one once."""

    __slots__ = ("_last_s", "_recorder", "record")

    def __init__(self, recorder: "Recorder", record: Record) -> None:
        self._recorder = recorder
        self.record = record
        self._last_s = 0.0

    def attempt(self, *, answering: str, prefill: str | None = None, hedge: bool = False) -> Attempt:
        """It is sent to workers (URLs). `hedge`: while the attempt before goes on."""
        made = Attempt(self._recorder.now_s(), answering, prefill, hedge=hedge)
        self.record.attempts.append(made)
        if len(self.record.attempts) > 1 and not hedge:
            self._recorder.second().retried += 1
        return made

    def prefill_ended(self, attempt: Attempt) -> None:
        """The prefill worker has nothing more to say: decode has the KV cache, or will never get it."""
        if attempt.prefill_ended_s is None:
            attempt.prefill_ended_s = self._recorder.now_s()

    def attempt_cancelled(self, attempt: Attempt) -> None:
        """Another one answered first."""
        attempt.cancelled_s = self._recorder.now_s()

    def attempt_failed(self, why: str, attempt: Attempt) -> None:
        attempt.failure, attempt.failed_s = why[:MAX_FAILURE_CHARS], self._recorder.now_s()

    def broke(self, why: str) -> None:
        """The answer ended early, though its status had gone out before."""
        self.record.failure = why[:MAX_FAILURE_CHARS]

    def first_byte(self) -> None:
        """The answer begins to leave; from then on `event` is called for each further piece."""
        now_s = self._recorder.now_s()
        self._last_s = self.record.first_byte_s = now_s
        self.record.num_events = 1
        self._recorder.count_ttft(now_s - self.record.started_s)

    def event(self) -> None:
        """A piece of a streamed answer came."""
        now_s = self._recorder.now_s()
        self._recorder.count_gap(now_s - self._last_s)
        self._last_s = now_s
        self.record.num_events += 1

    def end(self, status: int) -> None:
        record = self.record
        record.ended_s, record.status = self._recorder.now_s(), status
        if record.first_byte_s is not None:
            record.last_byte_s = self._last_s
        if not record.failure and status >= 400:
            record.failure = _last_failure(record.attempts) or _why(status)
        self._recorder.on_end(record)


class Recorder:
    """`place`: which of the router's processes this is. `now_s`: the clock."""

    def __init__(self, now_s: Callable[[], float], *, place: int = 0) -> None:
        self.now_s = now_s
        self._place = place
        self._serial = 0
        self._running: dict[str, Record] = {}
        self._ended: deque[Record] = deque(maxlen=KEPT_REQUESTS)
        self._seconds: deque[Second] = deque([Second(int(now_s()))], maxlen=KEPT_SECONDS)

    def begin(self, request_id: str, path: str, *, prompt_tokens: int, started_s: float) -> Watched:
        """A request that was read. `started_s`: when it came, by the same clock."""
        self._serial += 1
        key = f"{self._place}-{self._serial}"
        record = Record(key, request_id[:MAX_ID_CHARS], path, started_s, prompt_tokens, [])
        self.second().arrived += 1
        if len(self._running) < MAX_RUNNING:
            self._running[key] = record
        return Watched(self, record)

    def second(self) -> Second:
        """The one that runs."""
        at, last = int(self.now_s()), self._seconds[-1]
        if at != last.at:
            last = Second(at)
            self._seconds.append(last)
        return last

    def count_ttft(self, seconds: float) -> None:
        counts, bucket = self.second().ttft, bucket_of(seconds)
        counts[bucket] = counts.get(bucket, 0) + 1

    def count_gap(self, seconds: float) -> None:
        counts, bucket = self.second().gaps, bucket_of(seconds)
        counts[bucket] = counts.get(bucket, 0) + 1

    def on_failure(self, reason: str, role: str) -> None:
        """A worker failed a request, which may go well on another one."""
        failures, name = self.second().failures, f"{role} {reason}"
        failures[name] = failures.get(name, 0) + 1

    def on_end(self, record: Record) -> None:
        self._running.pop(record.key, None)
        self._ended.append(record)
        second = self.second()
        second.ended += 1
        second.failed += record.status >= 500 or (record.status < 400 and bool(record.failure))

    def on_report(self, role: Role, before: LoadReport | None, report: LoadReport | None) -> None:
        """What a worker says of itself, and what it said last. A counter that fell is a new process's."""
        if before is None or report is None:
            return
        second = self.second()
        if role is not Role.DECODE:
            second.prompt_tokens += max(0, report.prompt_tokens_total - before.prompt_tokens_total)
            second.kv_bytes += max(0, report.kv_bytes_total - before.kv_bytes_total)
        if role is not Role.PREFILL:
            second.output_tokens += max(0, report.output_tokens_total - before.output_tokens_total)

    def snapshot(self) -> Snapshot:
        return Snapshot([*self._seconds], [*self._ended, *self._running.values()])


def _last_failure(attempts: list[Attempt]) -> str:
    """Of the last attempt, or of the one that its hedge stood by."""
    last = attempts[-2:] if attempts and attempts[-1].hedge else attempts[-1:]
    return next((attempt.failure for attempt in last if attempt.failure), "")


def _why(status: int) -> str:
    return "the client went away" if status == GONE else f"HTTP {status}"
