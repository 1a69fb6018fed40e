"""An answer on its way to the client: relayed until its end, or the failure of its worker; and the
router's own answers to failures.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from fastapi import Response

from router.attempts.pair_attempt import AttemptLauncher, PairAttempt
from router.attempts.request import RequestContext
from router.attempts.upstream_call import CallFailed, broken_stream, circuit_blamed
from router.body import write_body
from router.client.upstream import nothing
from router.pool.breaker import Health
from router.pool.reports import lack_of, lacks_route, parse_error
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable, serves
from router.requests.merge import Merger
from service.http.errors import ApiError, draining
from service.http.request import DirectWrites, StreamedResponse
from service.http.resume import RESUME_FIELD, RESUME_HEADER, FrameRecord, sign
from service.http.routes import EVENTS_TYPE, LINES_TYPE, errors_of

log = logging.getLogger(__name__)

ENDS = "request %s ends with an error: %s"  # in the log, of a request whose worker is lost
WORKER_CODE = "worker_"  # begins the codes of such errors
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

    def __init__(
        self,
        content_type: str = EVENTS_TYPE,
        *,
        filters: Sequence[Callable[[bytes], bytes]] = (),
        record: FrameRecord | None = None,
    ) -> None:
        self._ends = next(ends for kind, ends in _ENDS.items() if content_type.startswith(kind))
        self._tail = b""
        self._filters = filters
        self._record = record

    def feed(self, chunk: bytes) -> bytes:
        events = self._whole(chunk)
        if self._record is not None:
            events = self._record.take(events)
        for change in self._filters if events else ():
            events = change(events)
        return events

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


def answer_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[low] for low, name in _ANSWER_HEADERS.items() if low in headers}


@dataclass(eq=False)
class ClientAnswer:
    """The answer of `attempt`, with prefill's part by `mergers`.

    It ends with its worker; a subclass may continue it elsewhere, and then changes `attempt`.
    """

    launcher: AttemptLauncher
    request: RequestContext
    attempt: PairAttempt
    mergers: Sequence[Merger] = ()

    async def whole(self) -> Response:
        return self._respond(self.attempt.answering.reply.take())

    async def stream(self) -> Response:
        request, reply = self.request, self.attempt.answering.reply
        try:
            self._follow()
            splitter = self._splitter()
            headers = {**answer_headers(reply.headers), "Cache-Control": "no-cache"}
            out = await request.client.open(request.http, status=reply.status, headers=headers)
            if request.events_first:
                await out.write(request.events_first)
            failure = await self._relay(out, splitter)
            while (lost := failure or self._incomplete()) and not request.handed_back:
                failure = lost
                if not await self._goes_on(lost):
                    break
                splitter.restart()
                failure = await self._relay(out, splitter)
            return await self._end(out, failure)
        finally:
            self._close()

    def _follow(self) -> None:
        self.attempt.watch_prefill(self.launcher.on_call_failed)

    def _incomplete(self) -> CallFailed | None:
        return None

    async def _goes_on(self, failure: CallFailed) -> bool:
        if not self.attempt.refused:  # reported before
            self.launcher.on_call_failed(failure)
        return False

    def _close(self) -> None:
        """Release what the answer holds, in the end."""

    def _splitter(self, record: FrameRecord | None = None) -> StreamSplitter:
        kind = self.attempt.answering.reply.headers["content-type"]
        filters = [merger.merge_events for merger in self.mergers]
        filters += [part.on_events for part in self.request.answer_parts]
        return StreamSplitter(kind, filters=filters, record=record)

    async def _relay(self, out: StreamedResponse, splitter: StreamSplitter) -> CallFailed | None:
        """Relay until the end or failure of the attempt's answer, which is returned.

        Connection errors of the client propagate.
        """
        request, attempt, call = self.request, self.attempt, self.attempt.answering
        reply, on_chunk, clock = call.reply, self.launcher.events.on_chunk, self.launcher.clock
        request.cut = reply.close
        if events := splitter.feed(reply.take()):
            await out.write(events)

        def take() -> bytes:
            if chunk := reply.take():
                now_s = clock()
                for notify in on_chunk:
                    notify(request, attempt, chunk, now_s)
                request.last_byte_s = now_s
                request.num_chunks += 1
            return splitter.feed(chunk)

        direct = DirectWrites(out, take=take, is_over=lambda: call.ended)
        reply.listener = direct.on_change
        try:
            while not call.ended or reply.num_buffered:
                if not reply.num_buffered:
                    await direct.wait()
                elif events := take():
                    await out.write(events)
        finally:
            reply.listener = nothing
        if reply.error is not None:
            return broken_stream(call.worker, reply.error)
        if rest := splitter.rest():
            await out.write(rest)
        return None

    async def _end(self, out: StreamedResponse, failure: CallFailed | None, last_event: bytes = b"") -> Response:
        """End the client's stream, perhaps with an error: `last_event` of the worker, else ours."""
        request, attempt = self.request, self.attempt
        await request.client.end()
        failure = attempt.refused or failure
        if request.handed_back:
            request.failure, error, last_event = HANDED_BACK, draining(HANDED_BACK), b""
        elif failure:
            request.failure, error = str(failure), failure_error(failure)
            if failure.reason != "status":
                log.warning(ENDS, request.request_id, failure)
        else:
            await out.end()
            self._complete()
            return out
        attempt.close()
        await out.end(last_event or errors_of(request.http).last_event(error))  # without [DONE]
        return out

    def _respond(self, body: bytes) -> Response:
        request, call = self.request, self.attempt.answering
        for part in request.answer_parts:
            body = part.on_answer(body)
        self._complete()
        for merger in self.mergers:
            body = merger.merge_answer(body)
        headers = answer_headers(call.reply.headers) | (JSON if call.framed else {})
        return Response(status_code=call.reply.status, content=body, headers=headers)

    def _complete(self) -> None:
        self.attempt.complete()
        circuit_blamed(self.request, self.attempt, self.launcher.clock())


def ask_for_rest(request: RequestContext, resume: bytes, secret: bytes) -> None:
    """Change the request into one for the rest of its answer (service/http/resume.py)."""
    fields = {**request.parsed.fields, RESUME_FIELD: msgspec.Raw(resume)}
    request.parsed = msgspec.structs.replace(request.parsed, fields=fields)
    request.body = write_body(request.parsed)
    request.headers = {**request.headers, RESUME_HEADER: sign(secret, resume)}


# ---- The router's own answers to failures. Pure.

HANDED_BACK = "the router is draining and could not finish this request (--drain-timeout); try again"


def no_worker(
    table: WorkerTable, missing: list[Role], model: str = "", *, retry_after_s: int | None = None
) -> ApiError:
    misfits = table.misfits
    known = [w for w in table.workers(missing[0]) if not model or serves(w.models, model)]
    why = "; ".join(f"{w.url}: {misfits.get(w.worker_id) or _state(w, table)}" for w in known[:4]) or "none was given"
    what = f"worker for model {model!r}" if model and table.models.several else "worker"
    state = "answers" if known and all(w.silent for w in known) else "is alive"
    state = "has a peer that fits" if any(w.worker_id in misfits for w in known) else state
    message = f"no {' and no '.join(missing)} {what} {state} ({why})"
    return ApiError(503, message, code="no_worker", retry_after_s=retry_after_s)


def _state(worker: Worker, table: WorkerTable) -> str:
    if not (table.pairs or worker.serves_whole) and worker.health is Health.UP:
        return "it serves no whole requests, give --route pair or auto"
    return "it does not answer its checks" if worker.silent else worker.checks.error or worker.health.value


def failure_response(failure: CallFailed, path: str) -> Response:
    """A worker's error unchanged. ApiError if there is none, or no such route."""
    if lacks_route(failure.status, failure.body):
        raise no_route(failure.worker, path) from None
    if failure.reason == "status":
        return Response(status_code=failure.status, content=failure.body, headers=answer_headers(failure.headers))
    status = 504 if failure.reason == "timeout" else 502
    raise ApiError(status, str(failure), code=f"{WORKER_CODE}{failure.reason}") from None


def no_route(worker: Worker, path: str) -> ApiError:
    return ApiError(501, lack_of(worker.runtime_type, path), code="not_implemented")


def failure_error(failure: CallFailed) -> ApiError:
    """The worker's message, else ours."""
    return error_of(failure.status or 502, failure.body or str(failure).encode())


def error_of(status: int, body: bytes) -> ApiError:
    message = parse_error(body)
    return ApiError(status, body.decode(errors="replace")[:2000] if message is None else message)
