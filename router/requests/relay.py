"""Relay of a worker's answer to the client."""

from collections.abc import Callable, Mapping, Sequence

import msgspec
from aiohttp import web

from router.attempts.request import RequestContext
from router.attempts.upstream_call import MOVED, CallFailed, UpstreamCall, broken_stream
from router.body import write_body
from router.client.upstream import UpstreamError
from router.pool.reports import lack_of, lacks_route, parse_error
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable, serves
from service.http.api_shapes import EVENTS_TYPE, LINES_TYPE
from service.http.errors import DRAINING, ApiError
from service.http.resume import RESUME_FIELD, RESUME_HEADER, FrameRecord, sign
from service.http.server import DirectWrites

MAX_EVENT_BYTES = 16 << 20  # longer events are passed on in pieces

_ANSWER_HEADERS = {
    "content-type": "Content-Type",
    "retry-after": "Retry-After",
    "x-tandem-ignored-fields": "X-Tandem-Ignored-Fields",
}
JSON = {"Content-Type": "application/json"}
_ENDS = {EVENTS_TYPE: (b"\n\n", b"\r\n\r\n"), LINES_TYPE: (b"\n",)}  # of an event, by content type


class StreamSplitter:
    """Passes on whole events, so that an error may follow at any time."""

    def __init__(self, content_type: str = EVENTS_TYPE, *, record: FrameRecord | None = None) -> None:
        """Split a stream; `record` takes its frames (service/http/resume.py)."""
        self._ends = next(ends for kind, ends in _ENDS.items() if content_type.startswith(kind))
        self._tail = b""
        self._record = record

    def feed(self, chunk: bytes) -> bytes:
        events = self._whole(chunk)
        return events if self._record is None else self._record.take(events)

    def restart(self) -> None:
        self._tail = b""
        if self._record is not None:
            self._record.drop_rest()

    def _whole(self, chunk: bytes) -> bytes:
        data = self._tail + chunk if self._tail else chunk
        if data.endswith(self._ends):
            self._tail = b""
            return data
        end = max(data.rfind(separator) + len(separator) if separator in data else 0 for separator in self._ends)
        if end == 0 and len(data) > MAX_EVENT_BYTES:
            end = len(data)
        self._tail = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        rest, self._tail = self._tail, b""
        return rest


class FilteredStream(StreamSplitter):
    """Passes whole events through `filters`."""

    def __init__(
        self,
        content_type: str,
        filters: Sequence[Callable[[bytes], bytes]],
        *,
        record: FrameRecord | None = None,
    ) -> None:
        super().__init__(content_type, record=record)
        self._filters = filters

    def feed(self, chunk: bytes) -> bytes:
        events = super().feed(chunk)
        for change in self._filters if events else ():
            events = change(events)
        return events


def answer_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[low] for low, name in _ANSWER_HEADERS.items() if low in headers}


async def relay_stream(
    http: web.BaseRequest,
    out: web.StreamResponse,
    call: UpstreamCall,
    *,
    splitter: StreamSplitter,
    on_more: Callable[[bytes], None],
) -> CallFailed | None:
    """Relay until the answer's end or failure, which is returned; the caller ends the response.

    `on_more` gets each chunk but the first. Connection errors of the client propagate.
    """
    reply = call.reply
    if events := splitter.feed(reply.take()):
        await out.write(events)

    def take() -> bytes:
        chunk = reply.take()
        if chunk:
            on_more(chunk)
        return splitter.feed(chunk)

    direct = DirectWrites(http, out, take=take, is_over=lambda: call.ended)
    reply.listener = direct.on_change
    try:
        while not call.ended or reply.num_buffered:
            events = take() if reply.num_buffered else await direct.wait()
            if events:
                await out.write(events)
    finally:
        reply.listener = _nothing
    if reply.error is not None:
        return broken_stream(call.worker, reply.error)
    if rest := splitter.rest():
        await out.write(rest)
    return None


def _nothing() -> None:
    """Do nothing."""


def has_moved(worker: Worker) -> CallFailed:
    return CallFailed(worker, reason=MOVED, detail="the answer has left it, and no other worker took it over")


def ask_for_rest(request: RequestContext, resume: bytes, secret: bytes) -> None:
    """Change the request into one for the rest of its answer (service/http/resume.py)."""
    fields = {**request.parsed.fields, RESUME_FIELD: msgspec.Raw(resume)}
    request.parsed = msgspec.structs.replace(request.parsed, fields=fields)
    request.body = write_body(request.parsed)
    request.headers = {**request.headers, RESUME_HEADER: sign(secret, resume)}


async def read_whole(call: UpstreamCall, record: FrameRecord) -> bytes | CallFailed:
    """Read a whole answer; `record` takes frames before it."""
    if not call.framed:
        return call.reply.take()
    data = b""
    try:
        while chunk := await call.reply.readany():
            data += chunk
            if data.startswith(b":"):
                data = record.take_head(data)
    except UpstreamError as err:
        return broken_stream(call.worker, err)
    if record.moved:
        return has_moved(call.worker)
    if record.failed:
        headers = {"content-type": "application/json"}
        if record.retry_after_s:
            headers["retry-after"] = str(record.retry_after_s)
        return CallFailed(call.worker, reason="status", status=record.failed, headers=headers, body=data)
    return data if data else CallFailed(call.worker, reason="lost", detail="the answer ended before its body")


# ---- The router's own answers to failures. Pure.

HANDED_BACK = "the router is draining and could not finish this request (--drain-timeout); try again"


def draining(message: str) -> ApiError:
    return ApiError(503, message, code=DRAINING, retry_after_s=1)


def no_worker(
    table: WorkerTable, missing: list[Role], model: str = "", *, retry_after_s: int | None = None
) -> ApiError:
    """Return an error with the missing role and workers' states."""
    known = [w for w in table.workers(missing[0]) if not model or serves(w.models, model)]
    why = "; ".join(f"{w.url}: {_state(w)}" for w in known[:4]) or "none was given"
    what = f"worker for model {model!r}" if model and table.models.several else "worker"
    state = "answers" if known and all(w.silent for w in known) else "is alive"
    message = f"no {' and no '.join(missing)} {what} {state} ({why})"
    return ApiError(503, message, code="no_worker", retry_after_s=retry_after_s)


def _state(worker: Worker) -> str:
    return "it does not answer its checks" if worker.silent else worker.last_error or worker.health.value


def failure_response(failure: CallFailed, path: str) -> web.Response:
    """Return a worker's error unchanged. ApiError if there is none, or no such route."""
    if lacks_route(failure.status, failure.body):
        raise no_route(failure.worker, path) from None
    if failure.reason == "status":
        return web.Response(status=failure.status, body=failure.body, headers=answer_headers(failure.headers))
    status = 504 if failure.reason == "timeout" else 502
    raise ApiError(status, str(failure), code=f"worker_{failure.reason}") from None


def no_route(worker: Worker, path: str) -> ApiError:
    return ApiError(501, lack_of(worker.runtime_type, path), code="not_implemented")


def failure_error(failure: CallFailed) -> ApiError:
    """Return a started stream's last error: the worker's message, else ours."""
    return error_of(failure.status or 502, failure.body or str(failure).encode())


def error_of(status: int, body: bytes) -> ApiError:
    message = parse_error(body)
    return ApiError(status, body.decode(errors="replace")[:2000] if message is None else message)
