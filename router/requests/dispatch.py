"""The dispatcher: reads a generation request, admits it, tries attempts, relays the answer.

Workers change only before anything is sent to the client. A drain refuses new requests; live ones
finish or are handed back. A block holds new ones while live ones finish, to change all workers in
between, as SGLang's input blocker.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from fastapi import Response

from router.attempts.pair_attempt import AttemptLauncher, PairAttempt
from router.attempts.request import BodyPart, RequestContext, RequestRefused, Serve, ServePart
from router.attempts.upstream_call import CallFailed
from router.body import ALONE, Api, named_dp_rank, parse_body
from router.choice.policies import Chooser
from router.client.credentials import Credentials
from router.pool.worker import Way
from router.pool.workers import UnknownModel
from router.requests.answer import ENDS, HANDED_BACK, WORKER_CODE, ClientAnswer, failure_response, no_worker
from router.requests.merge import Merger
from router.requests.picking import Picker
from service.http.errors import ApiError, draining
from service.http.guard import CALLER, CLIENT_GONE, caller_header, rank_in, time_given
from service.http.request import HttpRequest
from service.http.routes import REQUEST_ID, invoked_path
from service.process.stop_signals import wait_while
from service.security.keys import authorization_of
from service.waiter import BODIES

log = logging.getLogger(__name__)

MAX_BACKOFF_S = 1.0
RETRY_AFTER_S = 1
MAX_BLOCKED = 4096  # requests waiting in a block

Attempted = Callable[[AttemptLauncher, RequestContext, PairAttempt, Sequence[Merger]], ClientAnswer]


@dataclass(eq=False)
class LiveRequests:
    """Running and queued requests in order of arrival."""

    draining: bool = False
    requests: dict[RequestContext, None] = field(default_factory=dict)
    num_blocked: int = 0
    _open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._open.set()

    @property
    def blocked(self) -> bool:
        return not self._open.is_set()

    def __len__(self) -> int:
        return len(self.requests)

    def refuse_if_draining(self, http: HttpRequest) -> None:
        if self.draining:
            raise draining("the router is draining: it takes no new requests")

    async def block(self) -> None:
        """Hold new requests until `unblock`, and wait for live ones."""
        if not self.blocked:
            log.warning("the router is blocked: new requests wait for POST /continue_generation")
        self._open.clear()
        await wait_while(lambda: bool(self.requests), at_once=self._open)

    def unblock(self) -> None:
        if self.blocked:
            log.info("the router is no longer blocked, %d requests waited", self.num_blocked)
        self._open.set()

    async def wait_unblocked(self, *, timeout_s: float) -> None:
        """ApiError after the deadline, or for too many requests."""
        if self.num_blocked >= MAX_BLOCKED:
            message = f"{self.num_blocked} requests wait until the router is unblocked; try again later"
            raise ApiError(503, message, code="queue_full", retry_after_s=1)
        self.num_blocked += 1
        try:
            async with asyncio.timeout(timeout_s if timeout_s < math.inf else None):
                await self._open.wait()
        except TimeoutError:
            message = f"an operator has blocked the router for longer than {timeout_s:g} s, which the request may take"
            raise ApiError(504, message, code="deadline") from None
        finally:
            self.num_blocked -= 1

    async def drain(self, *, timeout_s: float, at_once: asyncio.Event) -> None:
        self.draining = True
        self.unblock()
        if self.requests:
            log.info("draining: %d requests run, for up to %g s (--drain-timeout)", len(self), timeout_s)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        await wait_while(lambda: bool(self.requests) and loop.time() < deadline_s, at_once=at_once)
        if self.requests:
            log.warning("draining: %d requests have not ended and are handed back", len(self))
        for request in list(self.requests):
            request.hand_back()


@dataclass(frozen=True, kw_only=True)
class RequestParts:
    """Parts of features (router/attempts/request.py), in order.

    `gates` raise ApiError before a body is read. `answer` makes the answer of an attempt. Workers
    get headers that the client sent (`passed`), and those `by_api` and of `streams`.
    """

    gates: tuple[Callable[[HttpRequest], None], ...] = ()
    bodies: tuple[BodyPart, ...] = ()
    around: tuple[ServePart, ...] = ()
    answer: Attempted = ClientAnswer
    passed: tuple[str, ...] = ()
    by_api: Mapping[Api, Mapping[str, str]] = field(default_factory=dict)
    streams: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False, kw_only=True)
class Dispatcher:
    """Up to `retry_max` retries with exponential pauses from `retry_backoff_s`, and none after
    `max_deaths` workers died with the request.
    """

    ways: tuple[Way, ...]
    picker: Picker
    chooser: Chooser
    launcher: AttemptLauncher
    live: LiveRequests
    credentials: Credentials
    retry_max: int
    retry_backoff_s: float
    max_deaths: float
    parts: RequestParts

    def __post_init__(self) -> None:
        self._bodies = {api: [part for part in self.parts.bodies if api in part.apis] for api in Api}
        self._serve_inside: Serve = self._serve
        for part in reversed(self.parts.around):
            self._serve_inside = _around(part, self._serve_inside)

    async def invoke(self, http: HttpRequest) -> Response:
        """Answer POST /invocations."""
        body = await http.read()
        return await self.handle(http, path=await BODIES.run(partial(invoked_path, body), size=len(body)))

    async def handle(self, http: HttpRequest, *, path: str = "") -> Response:
        if self.live.blocked:
            await self.live.wait_unblocked(timeout_s=time_given(http.headers))
        try:
            for refuse in self.parts.gates:
                refuse(http)
            return await self._handle(http, path or http.path)
        except (RequestRefused, UnknownModel) as error:
            for notify in self.launcher.events.on_refused:
                notify(error.why)
            raise

    async def _handle(self, http: HttpRequest, path: str) -> Response:
        task = asyncio.current_task()
        assert task is not None
        started_s = self.launcher.clock()
        request = RequestContext(
            http=http, task=task, request_id=http[REQUEST_ID], path=path, started_s=started_s, caller=http[CALLER].name
        )
        status = CLIENT_GONE
        self.live.requests[request] = None  # a context manager would cost ten times this
        try:
            await self._read(request)
            response = await self._serve_inside(request)
            status = response.status_code
            return response
        except ApiError as error:
            status = error.status
            if error.code is not None and error.code.startswith(WORKER_CODE):
                log.warning(ENDS, request.request_id, error)
            raise
        except asyncio.CancelledError:
            if not request.took_cancel():
                raise
            raise draining(HANDED_BACK) from None
        finally:
            del self.live.requests[request]
            for part in request.answer_parts:
                part.close()
            status, now_s = 503 if request.handed_back and status == CLIENT_GONE else status, self.launcher.clock()
            for notify in self.launcher.events.on_ended:
                notify(request, status, now_s)

    async def _read(self, request: RequestContext) -> None:
        """Raises ApiError."""
        http = request.http
        request.body = await http.read()
        size = len(request.body)
        parsed = request.parsed = await BODIES.run(partial(parse_body, Api(request.path), request.body), size=size)
        request.ways = tuple([way[:1] for way in self.ways]) if parsed.api in ALONE else self.ways
        request.model = self.picker.model_of(parsed, request.ways)
        for part in self._bodies[parsed.api]:
            if concerns(part, request.body):
                parsed = await part.prepare(request)
        names = self.picker.table.models.event_names
        request.hints = await self.chooser.hints(parsed, http.headers, names, size=size)
        named = rank_in(http.headers)
        request.dp_rank = named_dp_rank(parsed) if named is None else named
        request.headers = self._headers(request)
        for notify in self.launcher.events.on_routed:
            notify(request)

    def _headers(self, request: RequestContext) -> dict[str, str]:
        given, parts = request.http.headers, self.parts
        headers = {
            "Content-Type": "application/json",
            "X-Request-Id": request.request_id,
            **caller_header(request.http),
        }
        headers |= {name: given[name] for name in parts.passed if name in given}
        if request.parsed.streams:
            headers |= parts.streams
        headers |= parts.by_api.get(request.parsed.api, {})
        headers |= self.credentials.for_client(authorization_of(given))
        return headers

    async def _serve(self, request: RequestContext) -> Response:
        if not self.launcher.rooms.has_room_for(request.parsed.num_samples):
            message = "the router has too many samples in flight"
            raise ApiError(429, message, code="queue_full", retry_after_s=RETRY_AFTER_S)
        for number in range(self.retry_max + 1):
            placements = self.picker.pick(request) or await self.picker.pick_later(request)
            if placements is None:
                return self._none_left(request)
            if request.failed is not None and request.fails_by_itself(placements):
                return failure_response(request.failed.last, request.path)
            attempt = self.launcher.begin(request, placements)
            if number == self.retry_max:
                attempt.stay()
            try:
                return await self._attempt(request, attempt)
            except CallFailed as failure:
                if not failure.retryable or number == self.retry_max or request.is_to_blame(self.max_deaths):
                    return failure_response(failure, request.path)
                for notify in self.launcher.events.on_retry:
                    notify(failure)
            await asyncio.sleep(pause_s(number, self.retry_backoff_s))
        raise AssertionError("the last attempt returns")

    async def _attempt(self, request: RequestContext, attempt: PairAttempt) -> Response:
        try:
            await self.launcher.until_started(request, attempt)
            return await self._give(request, attempt)
        finally:
            attempt.end()

    async def _give(self, request: RequestContext, attempt: PairAttempt) -> Response:
        attempt.begin_answer()
        now_s = self.launcher.clock()
        for notify in self.launcher.events.on_first_byte:
            notify(request, attempt, now_s)
        request.first_byte_s = request.last_byte_s = now_s
        request.num_chunks = 1
        mergers: Sequence[Merger] = ()
        if request.parsed.wants_input_logprobs and attempt.prefill is not None:
            mergers = (Merger(request.parsed.api, attempt.prefill.reply.take()),)
        answer = self.parts.answer(self.launcher, request, attempt, mergers)
        return await (answer.stream() if attempt.answering.streaming else answer.whole())

    def _none_left(self, request: RequestContext) -> Response:
        missing = self.picker.missing(request)
        if request.failed is not None and not missing:
            return failure_response(request.failed.last, request.path)
        for notify in self.launcher.events.on_no_worker:
            notify(missing)
        raise no_worker(self.launcher.table, missing, request.model, retry_after_s=RETRY_AFTER_S)


def concerns(part: BodyPart, body: bytes) -> bool:
    """Return whether the part prepares a request with this body. False positives are possible."""
    return not part.needles or any([needle in body for needle in part.needles])


def _around(part: ServePart, serve: Serve) -> Serve:
    return lambda request: part(request, serve)


def pause_s(number: int, backoff_s: float) -> float:
    """The pause after a failed attempt: none, base, 2 * base..., up to `MAX_BACKOFF_S`."""
    return 0.0 if number == 0 else min(MAX_BACKOFF_S, backoff_s * 2 ** (number - 1))
