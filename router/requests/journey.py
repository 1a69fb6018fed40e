"""What became of one request: which workers it was sent to, when, and how that ended. One for each request under way.

It is told; it decides nothing, and it is the only one that is: the trace's record (service/telemetry/records.py), the log line and
what the dashboard shows (router/history/records.py) are made of it when somebody asks. Times are monotonic seconds, read
once by who tells it.
"""

import logging
from collections.abc import Sequence

import msgspec

from router.history.recorder import Recorder
from router.history.records import Attempt as ShownAttempt
from router.history.records import Record as ShownRecord
from router.pool.worker import Worker
from router.requests.legs import Leg
from service.http.guard import CLIENT_GONE
from service.telemetry.context import OPERATIONS
from service.telemetry.logs import about
from service.telemetry.records import Record, Span
from service.telemetry.tracer import Place, Tracer, unix_offset_s

log = logging.getLogger(__name__)

MAX_MODEL_BYTES = 256  # kept of what a client may send
MAX_ROOMS = 16  # likewise
MAX_ID_CHARS = 128  # of what the dashboard is told
MAX_FAILURE_CHARS = 300


class Journeys:
    """Begins them. `recorder`: counts them, and keeps the last; `log_requests`: a line for each that ends (--log-requests)."""

    def __init__(self, tracer: Tracer, recorder: Recorder, *, log_requests: bool = False) -> None:
        self.tracer = tracer
        self.recorder = recorder
        self.log_requests = log_requests

    def begin(self, request_id: str, path: str, traceparent: str, *, now_s: float) -> "Journey":
        return Journey(self, request_id, path, self.tracer.place_under(traceparent), now_s)


class Past(msgspec.Struct, frozen=True):
    """A leg that is over. `error`: what went wrong ("": nothing)."""

    worker: Worker
    over_s: float
    error: str


class Attempt:
    """One try: its legs, in the order they were sent, and once the request is over what is left to tell of them."""

    __slots__ = ("cancelled_s", "failed_s", "failure", "hedge", "legs", "past", "started_s")

    def __init__(self, legs: tuple[Leg, ...], started_s: float, *, hedge: bool) -> None:
        self.started_s = started_s
        self.hedge = hedge
        self.cancelled_s: float | None = None
        self.legs = legs
        self.past: Sequence[Past] = ()
        self.failure = ""
        self.failed_s: float | None = None

    def settle(self, now_s: float) -> None:
        """Keeps no leg: behind it are the worker's answer and the client's request."""
        self.past = [_past(leg, self.started_s, now_s) for leg in self.legs]
        self.legs = ()

    def shown(self) -> ShownAttempt:
        workers = [leg.worker for leg in self.legs] or [past.worker for past in self.past]
        prefill = workers[0].url if len(workers) > 1 else None
        over_s = self._first_over_s() if prefill else None
        return ShownAttempt(
            self.started_s,
            workers[-1].url,
            prefill,
            over_s,
            self.failure,
            self.failed_s,
            self.hedge,
            self.cancelled_s,
        )

    def _first_over_s(self) -> float | None:
        """When the first leg had nothing more to say; None: it still may."""
        if self.past:
            return self.past[0].over_s
        return max(self.started_s, self.legs[0].reply.heard_s) if self.legs[0].ended else None


class Journey:
    """`traceparent`: what workers are sent, "": as the client sent it."""

    __slots__ = (
        *("_attempts", "_ended_s", "_failure", "_first_byte_s", "_key", "_last_s", "_model", "_num_events"),
        *("_num_samples", "_offset_s", "_owner", "_path", "_place", "_prompt_tokens", "_request_id", "_rooms"),
        *("_started_s", "_status"),
    )

    def __init__(self, owner: Journeys, request_id: str, path: str, place: Place | None, started_s: float) -> None:
        self._owner = owner
        self._request_id = request_id
        self._path = path
        self._place = place
        self._started_s = started_s
        self._key = ""  # on the dashboard; "": nothing could be read
        self._first_byte_s: float | None = None
        self._last_s = 0.0
        self._num_events = 0
        self._ended_s: float | None = None
        self._offset_s = 0.0
        self._status = 0
        self._failure = ""
        self._attempts: list[Attempt] = []
        self._rooms: Sequence[int] = ()
        self._num_samples = self._prompt_tokens = 0
        self._model = b""

    @property
    def traceparent(self) -> str:
        return "" if self._place is None else self._place.at.header()

    def asked(self, *, num_samples: int, prompt_tokens: int, model: bytes) -> None:
        """Its body was read. `model`: the field's JSON text, b"" where there is none."""
        self._num_samples = num_samples
        self._prompt_tokens = prompt_tokens
        self._model = model[:MAX_MODEL_BYTES]

    def routed(self) -> None:
        """It is one that workers may serve: from now on it is shown."""
        self._key = self._owner.recorder.begin(self, self._started_s)

    def sent(self, *legs: Leg, rooms: Sequence[int] = (), now_s: float, hedge: bool = False) -> Attempt:
        """One attempt: to these workers, the one that answers last. `hedge`: while the attempt before goes on."""
        self._rooms = rooms[:MAX_ROOMS]
        attempt = Attempt(legs, now_s, hedge=hedge)
        self._attempts.append(attempt)
        if len(self._attempts) > 1 and not hedge:
            self._owner.recorder.second(now_s).retried += 1
        return attempt

    def attempt_cancelled(self, attempt: Attempt, *, now_s: float) -> None:
        """Another one answered first."""
        attempt.cancelled_s = now_s

    def attempt_failed(self, why: str, attempt: Attempt, *, now_s: float) -> None:
        attempt.failure, attempt.failed_s = why[:MAX_FAILURE_CHARS], now_s

    def broke(self, why: str) -> None:
        """The answer ended early, though its status had gone out before."""
        self._failure = why[:MAX_FAILURE_CHARS]

    def first_byte(self, now_s: float) -> None:
        """The answer begins to leave; from then on `event` is called for each further piece."""
        self._last_s = self._first_byte_s = now_s
        self._num_events = 1
        self._owner.recorder.count_ttft(now_s - self._started_s, now_s)

    def event(self, now_s: float) -> None:
        """A piece of a streamed answer came."""
        self._owner.recorder.count_gap(now_s - self._last_s, now_s)
        self._last_s = now_s
        self._num_events += 1

    def end(self, status: int, *, now_s: float) -> None:
        """It was answered."""
        owner = self._owner
        self._ended_s, self._status, self._offset_s = now_s, status, unix_offset_s()
        for attempt in self._attempts:
            attempt.settle(now_s)
        if self._key:
            if status >= 400 and not self._failure:
                self._failure = _last_failure(self._attempts) or _why(status)
            failed = status >= 500 or (status < 400 and bool(self._failure))
            owner.recorder.on_end(self, self._key, failed=failed, now_s=now_s)
        owner.tracer.add(self._request_id, self._record, place=self._place)
        if owner.log_requests:
            self._say()

    def shown(self) -> ShownRecord:
        """As the dashboard tells of it."""
        ended = self._ended_s is not None and self._first_byte_s is not None
        return ShownRecord(
            key=self._key,
            request_id=self._request_id[:MAX_ID_CHARS],
            path=self._path,
            started_s=self._started_s,
            prompt_tokens=self._prompt_tokens,
            attempts=[attempt.shown() for attempt in self._attempts],
            first_byte_s=self._first_byte_s,
            last_byte_s=self._last_s if ended else None,
            num_events=self._num_events,
            ended_s=self._ended_s,
            status=self._status,
            failure=self._failure,
        )

    def _record(self) -> Record:
        wall, ended_s = self._offset_s, self._end_s
        legs = [
            Span(
                name=f"{past.worker.role.value} leg",
                start_s=attempt.started_s + wall,
                end_s=past.over_s + wall,
                attributes={"url.full": past.worker.url, **_error(past.error)},
            )
            for attempt in self._attempts
            for past in attempt.past
        ]
        stream = []
        if self._first_byte_s is not None:
            stream = [Span(name="answer", start_s=self._first_byte_s + wall, end_s=ended_s + wall)]
        return Record(
            request_id=self._request_id,
            process="router",
            operation=OPERATIONS.get(self._path, ""),
            model=_text(self._model),
            start_s=self._started_s + wall,
            end_s=ended_s + wall,
            error=str(self._status) if self._status >= 400 else "",
            attributes=self._attributes(),
            spans=legs + stream,
        )

    @property
    def _end_s(self) -> float:
        return self._started_s if self._ended_s is None else self._ended_s

    def _attributes(self) -> dict[str, str | int | float]:
        said: dict[str, str | int | float] = {"url.path": self._path, "http.response.status_code": self._status}
        if self._num_samples:
            said["gen_ai.request.choice.count"] = self._num_samples
        if self._rooms:
            said["tandem.bootstrap_room"] = ",".join(map(str, self._rooms))
        if self._first_byte_s is not None:
            said["gen_ai.response.time_to_first_chunk"] = self._first_byte_s - self._started_s
        return said

    def _say(self) -> None:
        workers = " ".join(past.worker.url for attempt in self._attempts for past in attempt.past)
        taken_s = self._end_s - self._started_s
        said = about(
            request_id=self._request_id,
            path=self._path,
            status=self._status,
            duration_s=round(taken_s, 6),
            ttfb_s=-1.0 if self._first_byte_s is None else round(self._first_byte_s - self._started_s, 6),
            room=str(self._rooms[0]) if self._rooms else "",
            workers=workers,
        )
        text = "%s %d %.3fs %s to %s"
        log.info(text, self._path, self._status, taken_s, self._request_id, workers or "nobody", extra=said)


def _past(leg: Leg, sent_s: float, now_s: float) -> Past:
    """A leg that still runs is over now, as far as the client is concerned."""
    reply = leg.reply
    over_s = min(reply.heard_s, now_s) if leg.ended else now_s
    error = "" if reply.error is None else reply.error.reason
    if not error and reply.status >= 400:
        error = str(reply.status)
    return Past(leg.worker, max(sent_s, over_s), error)


def _last_failure(attempts: Sequence[Attempt]) -> str:
    """Of the last attempt, or of the one that its hedge stood by."""
    last = attempts[-2:] if attempts and attempts[-1].hedge else attempts[-1:]
    return next((attempt.failure for attempt in last if attempt.failure), "")


def _why(status: int) -> str:
    return "the client went away" if status == CLIENT_GONE else f"HTTP {status}"


def _text(value: bytes) -> str:
    """A JSON string; "" for anything else."""
    try:
        return msgspec.json.decode(value, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def _error(error: str) -> dict[str, str]:
    return {"error.type": error} if error else {}
