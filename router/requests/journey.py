"""What became of one request: which workers it was sent to, when, and how that ended. One for each request under way.

It is told; it decides nothing. While the request runs it keeps a few numbers; the record (telemetry/records.py) is made when
somebody asks for it, or a collector wants it.
"""

import logging
import time
from collections.abc import Sequence

import msgspec

from router.requests.legs import Leg
from telemetry.context import CURRENT, OPERATIONS, RequestContext
from telemetry.logs import about
from telemetry.records import Record, Span
from telemetry.tracer import Place, Tracer, unix_offset_s

log = logging.getLogger(__name__)

CLIENT_GONE = 499
MAX_MODEL_BYTES = 256  # kept of what a client may send
MAX_ROOMS = 16  # likewise


class Journeys:
    """Begins them. `log_requests`: a line for each that ends (--log-requests)."""

    def __init__(self, tracer: Tracer, *, log_requests: bool = False) -> None:
        self.tracer = tracer
        self.log_requests = log_requests

    def begin(self, request_id: str, path: str, traceparent: str, *, now_s: float) -> "Journey":
        """`now_s`: monotonic seconds, as all times here."""
        CURRENT.set(RequestContext(request_id))  # for log lines of this task, which serves one request at a time
        return Journey(self, request_id, path, self.tracer.place_under(traceparent), now_s)


class Journey:
    """`traceparent`: what workers are sent, "": as the client sent it."""

    __slots__ = (
        *("_ended_s", "_first_byte_s", "_legs", "_model", "_num_samples", "_offset_s", "_owner", "_path", "_place"),
        *("_request_id", "_rooms", "_sent", "_started_s", "_status"),
    )

    def __init__(self, owner: Journeys, request_id: str, path: str, place: Place | None, started_s: float) -> None:
        self._owner = owner
        self._request_id = request_id
        self._path = path
        self._place = place
        self._started_s = started_s
        self._first_byte_s: float | None = None
        self._ended_s = started_s
        self._status = 0
        self._rooms: Sequence[int] = ()
        self._sent: list[tuple[Leg, float]] = []
        self._legs: list[tuple[str, str, float, float, str]] = []
        self._num_samples = 0
        self._model = b""
        self._offset_s = 0.0

    @property
    def traceparent(self) -> str:
        return "" if self._place is None else self._place.at.header()

    def asked(self, num_samples: int, model: bytes) -> None:
        """Its body was read. `model`: the field's JSON text, b"" where there is none."""
        self._num_samples = num_samples
        self._model = model[:MAX_MODEL_BYTES]

    def sent(self, *legs: Leg, rooms: Sequence[int] = ()) -> None:
        """One attempt: to these workers."""
        now_s = time.monotonic()
        self._rooms = rooms[:MAX_ROOMS]
        self._sent += [(leg, now_s) for leg in legs]

    def first_byte(self) -> None:
        self._first_byte_s = time.monotonic()

    def end(self, status: int) -> None:
        """It was answered. Keeps times and names of its legs, not the legs."""
        self._ended_s, self._status, self._offset_s = time.monotonic(), status, unix_offset_s()
        self._legs = [_leg(leg, sent_s, self._ended_s) for leg, sent_s in self._sent]
        self._sent = []
        self._owner.tracer.add(self._request_id, self._record, place=self._place)
        if self._owner.log_requests:
            self._say()

    def _record(self) -> Record:
        wall = self._offset_s
        legs = [
            Span(
                name=f"{role} leg",
                start_s=start_s + wall,
                end_s=end_s + wall,
                attributes={"url.full": url, **_error(e)},
            )
            for role, url, start_s, end_s, e in self._legs
        ]
        stream = []
        if self._first_byte_s is not None:
            stream = [Span(name="answer", start_s=self._first_byte_s + wall, end_s=self._ended_s + wall)]
        return Record(
            request_id=self._request_id,
            process="router",
            operation=OPERATIONS.get(self._path, ""),
            model=_text(self._model),
            start_s=self._started_s + wall,
            end_s=self._ended_s + wall,
            error=str(self._status) if self._status >= 400 else "",
            attributes=self._attributes(),
            spans=legs + stream,
        )

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
        workers = " ".join(url for _, url, *_ in self._legs)
        taken_s = self._ended_s - self._started_s
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


def _leg(leg: Leg, sent_s: float, now_s: float) -> tuple[str, str, float, float, str]:
    """(role, url, sent, over, what went wrong). A leg that still runs is over now, as far as the client is concerned."""
    over_s = min(leg.reply.heard_s, now_s) if leg.ended else now_s
    error = "" if leg.reply.error is None else leg.reply.error.reason
    if not error and leg.reply.status >= 400:
        error = str(leg.reply.status)
    return leg.worker.role.value, leg.worker.url, sent_s, max(sent_s, over_s), error


def _text(value: bytes) -> str:
    """A JSON string; "" for anything else."""
    try:
        return msgspec.json.decode(value, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def _error(error: str) -> dict[str, str]:
    return {"error.type": error} if error else {}
