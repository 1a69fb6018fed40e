"""The dispatcher: reads a generation request, admits it, tries attempts, relays the answer.

Workers change only before anything is sent to the client. Every exit ends the attempts.
"""

import asyncio
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from router.admission.admission import PRIORITY_HEADER, Admission
from router.admission.queue import RequestRefused
from router.attempts.pair_attempt import AttemptLauncher, PairAttempt
from router.attempts.request import ITL_HEADER, TTFT_HEADER, RequestContext, time_given
from router.attempts.upstream_call import CallFailed, circuit_blamed
from router.body import ALONE, Api, ParsedBody, named_dp_rank, parse_body, write_body
from router.choice.chooser import Chooser
from router.choice.policies import RoutingHints
from router.client.credentials import Credentials
from router.pool.worker import Way
from router.pool.workers import UnknownModel
from router.requests.failover import Failover
from router.requests.images import BodyImages, holds_images
from router.requests.kept_alive import serve_kept_alive
from router.requests.live import LiveRequests
from router.requests.merge import Merger, SseMerger
from router.requests.picking import Picker
from router.requests.reconnect import Reconnect
from router.requests.relay import (
    HANDED_BACK,
    JSON,
    StreamSplitter,
    answer_headers,
    draining,
    failure_error,
    failure_response,
    no_worker,
    open_answer,
    read_whole,
    relay_stream,
)
from router.requests.responses import Responses, RetainedStream
from service.http.api_shapes import REQUEST_ID
from service.http.errors import ApiError
from service.http.guard import CALLER, CLIENT_GONE, ENVOY_HEADER, RANK_HEADER, TIMEOUT_HEADER, caller_header, rank_in
from service.http.keep_alive import NO_BEATS_HEADER
from service.http.resume import FrameRecord
from service.http.routes import errors_of, invoked_path
from service.security.keys import authorization_of
from service.waiter import BODIES

MAX_BACKOFF_S = 1.0
RETRY_AFTER_S = 1

_PASSED_HEADERS = (
    "traceparent",
    "tracestate",
    TIMEOUT_HEADER,
    ENVOY_HEADER,
    PRIORITY_HEADER,
    TTFT_HEADER,
    ITL_HEADER,
    RANK_HEADER,
)


@dataclass(eq=False, kw_only=True)
class Dispatcher:
    """Serves POST of `Api`'s paths.

    Up to `retry_max` retries with exponential pauses from `retry_backoff_s`. Streams are silent for
    at most `keep_alive_s`, 0 for no limit.
    """

    ways: tuple[Way, ...]
    picker: Picker
    admission: Admission
    launcher: AttemptLauncher
    live: LiveRequests
    responses: Responses
    retry_max: int
    retry_backoff_s: float
    keep_alive_s: float
    credentials: Credentials | None
    chooser: Chooser | None
    failover: Failover | None
    reconnect: Reconnect | None
    images: BodyImages

    async def invoke(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer POST /invocations."""
        body = await http.read()
        return await self.handle(http, path=await BODIES.run(partial(invoked_path, body), size=len(body)))

    async def handle(self, http: web.BaseRequest, *, path: str = "") -> web.StreamResponse:
        if self.live.blocked:
            await self.live.wait_unblocked(timeout_s=time_given(http.headers))
        if self.live.draining:
            raise draining("the router is draining: it takes no new requests")
        try:
            self.admission.refuse_early(http)
            return await self._handle(http, path or http.path)
        except (RequestRefused, UnknownModel) as error:
            for notify in self.launcher.events.on_refused:
                notify(error.why)
            raise

    async def _handle(self, http: web.BaseRequest, path: str) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        started_s = self.launcher.clock()
        request = RequestContext(
            http=http,
            task=task,
            request_id=http[REQUEST_ID],
            path=path,
            started_s=started_s,
            caller=http[CALLER].name,
        )
        status = CLIENT_GONE
        self.live.requests[request] = None  # a context manager would cost ten times this
        try:
            await self._read(request)
            if self.keep_alive_s and request.parsed.streams:
                response = await serve_kept_alive(request, self._serve_in_turn, interval_s=self.keep_alive_s)
            else:
                response = await self._serve_in_turn(request)
            status = response.status
            return response
        except ApiError as error:
            status = error.status
            raise
        except asyncio.CancelledError:
            if not request.took_cancel():
                raise
            raise draining(HANDED_BACK) from None
        finally:
            del self.live.requests[request]
            if request.keeper is not None:
                request.keeper.close()
            status, now_s = 503 if request.handed_back and status == CLIENT_GONE else status, self.launcher.clock()
            for notify in self.launcher.events.on_ended:
                notify(request, status, now_s)

    async def _read(self, request: RequestContext) -> None:
        """Fill in `request`. Raises ApiError."""
        http = request.http
        request.body = await http.read()
        size = len(request.body)
        if self.reconnect is not None:
            await BODIES.run(partial(self.reconnect.note, request), size=size)
        parsed = request.parsed = await BODIES.run(partial(parse_body, Api(request.path), request.body), size=size)
        if parsed.api is Api.RESPONSES:
            await self.responses.open(request)
            parsed = request.parsed
        request.ways = tuple([way[:1] for way in self.ways]) if parsed.api in ALONE else self.ways
        request.model = self.picker.model_of(parsed, request.ways)
        shown = await self._take_images(request) if holds_images(request.body, parsed) else parsed
        if self.chooser is not None:
            request.hints = await BODIES.run(partial(self.chooser.hints_of, shown, http.headers), size=size)
        else:
            request.hints = RoutingHints(prompt_tokens=shown.prompt_tokens, output_tokens=shown.output_tokens)
        named = rank_in(http.headers)
        request.dp_rank = named_dp_rank(parsed) if named is None else named
        request.slo = self.admission.slo_of(http)
        for notify in self.launcher.events.on_routed:
            notify(request)
        request.headers = self._headers(request)
        if self.reconnect is not None:
            request.headers = {**request.headers, **self.reconnect.headers(request)}
            await self.reconnect.go_on(request)

    async def _take_images(self, request: RequestContext) -> ParsedBody:
        """Extract images; return the body for routing."""
        taken = await self.images.take(request.parsed)
        if taken.fetched:
            request.body = write_body(taken.body)
        request.parsed, request.images = taken.body, taken.digests
        return taken.shown

    def _headers(self, request: RequestContext) -> dict[str, str]:
        given = request.http.headers
        headers = {
            "Content-Type": "application/json",
            "X-Request-Id": request.request_id,
            **caller_header(request.http),
        }
        headers |= {name: given[name] for name in _PASSED_HEADERS if name in given}
        if request.traceparent:
            headers["traceparent"] = request.traceparent
        if request.parsed.streams:
            headers[NO_BEATS_HEADER] = "1"
        if self.failover is not None and request.parsed.api not in ALONE:
            headers |= self.failover.headers()
        authorization = authorization_of(given)
        if self.credentials is not None:
            headers |= self.credentials.for_client(authorization)
        elif authorization:
            headers["Authorization"] = authorization
        return headers

    async def _serve_in_turn(self, request: RequestContext) -> web.StreamResponse:
        ticket = await self.admission.enter(request)
        try:
            return await self._serve(request)
        finally:
            self.admission.leave(ticket)

    async def _serve(self, request: RequestContext) -> web.StreamResponse:
        if not self.launcher.rooms.has_room_for(request.parsed.num_samples):
            message = "the router has too many samples in flight"
            raise ApiError(429, message, code="queue_full", retry_after_s=RETRY_AFTER_S)
        for number in range(self.retry_max + 1):
            placements = self.picker.pick(request) or await self.picker.pick_later(request)
            if placements is None:
                return self._none_left(request)
            if request.failed is not None and request.fails_by_itself(placements):
                return failure_response(request.failed.last, request.path)
            attempt = self.launcher.begin(request, request.headers_at(self.launcher.clock()), placements)
            if number == self.retry_max:
                attempt.stay()
            try:
                return await self._attempt(request, attempt)
            except CallFailed as failure:
                if not failure.retryable or number == self.retry_max or self._is_to_blame(request):
                    return failure_response(failure, request.path)
                for notify in self.launcher.events.on_retry:
                    notify(failure)
            await asyncio.sleep(pause_s(number, self.retry_backoff_s))
        raise AssertionError("the last attempt returns")

    async def _attempt(self, request: RequestContext, attempt: PairAttempt) -> web.StreamResponse:
        try:
            await self.launcher.until_started(request, attempt)
            return await self._give(request, attempt)
        finally:
            attempt.end()

    async def _give(self, request: RequestContext, attempt: PairAttempt) -> web.StreamResponse:
        attempt.begin_answer()
        now_s = self.launcher.clock()
        for notify in self.launcher.events.on_first_byte:
            notify(request, attempt, now_s)
        request.first_byte_s = request.last_byte_s = now_s
        request.num_chunks = 1
        call, prefill, merger = attempt.answering, attempt.prefill, None
        if request.parsed.wants_input_logprobs and prefill is not None:
            merger = Merger(request.parsed.api, prefill.reply.take())
        if call.streaming:
            return await self._stream(request, attempt, merger)
        if call.framed:
            return await self._framed(request, attempt, merger)
        return _whole(request, attempt, merger, call.reply.take())

    async def _framed(self, request: RequestContext, attempt: PairAttempt, merger: Merger | None) -> web.Response:
        """Return a long whole answer. If it cannot continue elsewhere it restarts (CallFailed)."""
        assert self.failover is not None, "only a router with failover asks for frames"
        answer = self.failover.open(request, attempt.end)
        try:
            answer.follow(attempt)
            body = await read_whole(attempt.answering, answer.record)
            while isinstance(body, CallFailed):
                rest = await answer.take_over(attempt, body, merger)
                failure = attempt.refused or body
                if rest is None and failure.retryable and not answer.record.can_resume():
                    raise failure
                if rest is None:
                    return failure_response(failure, request.path)
                attempt = rest
                body = await read_whole(attempt.answering, answer.record)
            return _whole(request, attempt, merger, body)
        finally:
            answer.close()

    def _is_to_blame(self, request: RequestContext) -> bool:
        ends_workers = self.failover is not None and request.ends_workers(self.failover.most)
        return ends_workers or request.fails_by_itself()

    async def _stream(self, request: RequestContext, attempt: PairAttempt, merger: Merger | None) -> web.StreamResponse:
        attempt.watch_prefill(self.launcher.on_call_failed)
        request.cut = attempt.answering.reply.close
        on_chunk, clock = self.launcher.events.on_chunk, self.launcher.clock

        def on_more(chunk: bytes) -> None:
            now_s = clock()
            for notify in on_chunk:
                notify(request, attempt, chunk, now_s)
            request.last_byte_s = now_s
            request.num_chunks += 1

        answer = None if self.failover is None else self.failover.open(request, attempt.end)
        splitter = _splitter(request, attempt, merger, None if answer is None else answer.record)
        out = await open_answer(request.http, attempt.answering.reply, request.alive)
        if request.events_first:
            await out.write(request.events_first)
        try:
            if answer is not None:
                answer.follow(attempt)
            failure = await relay_stream(request.http, out, attempt.answering, splitter=splitter, on_more=on_more)
            while answer is not None and (lost := failure or answer.failure(attempt)) and not request.handed_back:
                failure, rest = lost, await answer.take_over(attempt, lost, merger)
                if rest is None:
                    break
                attempt = rest
                request.cut = attempt.answering.reply.close
                splitter.restart()
                failure = await relay_stream(request.http, out, attempt.answering, splitter=splitter, on_more=on_more)
            said = b"" if answer is None or not answer.record.failed else answer.record.last_event
            return await self._end(request, attempt, out, failure, said=said)
        finally:
            if answer is not None:
                answer.close()

    async def _end(
        self,
        request: RequestContext,
        attempt: PairAttempt,
        out: web.StreamResponse,
        failure: CallFailed | None,
        *,
        said: bytes,
    ) -> web.StreamResponse:
        """End the client's stream, perhaps with an error, `said` by the worker or ours."""
        if request.alive is not None:
            await request.alive.end()
        if request.handed_back:
            request.failure, error, said = HANDED_BACK, draining(HANDED_BACK), b""
        elif attempt.refused is not None:  # reported before
            request.failure, error = str(attempt.refused), failure_error(attempt.refused)
        elif failure is not None:
            if self.failover is None:
                self.launcher.on_call_failed(failure)
            request.failure, error = str(failure), failure_error(failure)
        else:
            await out.write_eof()
            _complete(request, attempt)
            return out
        attempt.close()
        await out.write(said or errors_of(request.http).last_event(error))  # without [DONE]
        await out.write_eof()
        return out

    def _none_left(self, request: RequestContext) -> web.Response:
        missing = self.picker.missing(request)
        if request.failed is not None and not missing:
            return failure_response(request.failed.last, request.path)
        for notify in self.launcher.events.on_no_worker:
            notify(missing)
        raise no_worker(self.launcher.table, missing, request.model, retry_after_s=RETRY_AFTER_S)


def _whole(request: RequestContext, attempt: PairAttempt, merger: Merger | None, body: bytes) -> web.Response:
    reply = attempt.answering.reply
    if request.keeper is not None:
        request.keeper.on_answer(body)
    _complete(request, attempt)
    headers = answer_headers(reply.headers) | (JSON if attempt.answering.framed else {})
    return web.Response(status=reply.status, body=merger.merge_answer(body) if merger else body, headers=headers)


def _complete(request: RequestContext, attempt: PairAttempt) -> None:
    attempt.complete()
    circuit_blamed(request, attempt, attempt.launcher.clock())


def _splitter(
    request: RequestContext, attempt: PairAttempt, merger: Merger | None, record: FrameRecord | None
) -> StreamSplitter:
    if request.keeper is not None:
        return RetainedStream(request.keeper, record=record)
    if merger is not None:
        return SseMerger(merger, record=record)
    return StreamSplitter(attempt.answering.reply.headers["content-type"], record=record)


def pause_s(number: int, backoff_s: float) -> float:
    """Return the pause after a failed attempt: none, base, 2 * base..., up to `MAX_BACKOFF_S`."""
    return 0.0 if number == 0 else min(MAX_BACKOFF_S, backoff_s * 2 ** (number - 1))
