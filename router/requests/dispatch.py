"""Serves one generation request: picks workers, sends the legs, retries, answers. Owns rooms and leases while it runs.

A request may move to other workers only while nothing was sent to the client. Every way out of here releases what was
taken: rooms, leases, tasks and connections.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from router.admission.admission import PRIORITY_HEADER, Admission
from router.admission.door import Refused
from router.admission.forecast import ITL_HEADER, TTFT_HEADER, Pace, Slo, Trip, requests_at
from router.choice.chooser import Chooser, cost_tokens
from router.choice.policies import Ask, Choice
from router.config import RouterConfig
from router.http.credentials import Credentials
from router.http.errors import error_kind, error_response
from router.http.guard import REQUEST_ID
from router.http.relay import StreamBroken, end_with_event, relay_stream
from router.http.sse import error_event
from router.metrics import RouterMetrics
from router.pool.breaker import Event
from router.pool.models import UnknownModel, serves
from router.pool.workers import Lease, Role, Worker, WorkerTable, missing_roles
from router.requests.attempts import Attempts
from router.requests.deadline import ENVOY_HEADER, TIMEOUT_HEADER
from router.requests.draining import DRAINING, LiveRequest, LiveRequests
from router.requests.journey import CLIENT_GONE, Journey, Journeys
from router.requests.legs import Call, Leg, LegError, Legs
from router.requests.merge import Merger, SseMerger
from router.requests.race import Race
from router.requests.rewrite import Api, BadBody, ParsedBody, named_model, parse_body, write_bodies
from router.requests.rooms import RoomMinter
from security.voucher import VOUCHER_HEADER, vouch

log = logging.getLogger(__name__)

MAX_BACKOFF_S = 1.0
WAIT_POLL_S = 0.02
RETRY_AFTER_S = "1"  # told to clients when no worker is there

HANDED_BACK = "the router is draining and could not finish this request (--drain-timeout); try again"

_PASSED_HEADERS = (
    "traceparent",
    "tracestate",
    TIMEOUT_HEADER,
    ENVOY_HEADER,
    PRIORITY_HEADER,
    TTFT_HEADER,
    ITL_HEADER,
)
_ANSWER_HEADERS = {"content-type": "Content-Type", "retry-after": "Retry-After"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a dispatcher works with; each is owned by the server that built it."""

    config: RouterConfig
    table: WorkerTable
    rooms: RoomMinter
    chooser: Chooser
    legs: Legs
    metrics: RouterMetrics
    credentials: Credentials
    secret: bytes | None
    live: LiveRequests
    admission: Admission
    on_unreachable: Callable[[LegError], None]
    journeys: Journeys
    clock: Callable[[], float] = time.monotonic


class _Exchange(msgspec.Struct, kw_only=True):
    """One client's request while it is served."""

    request: web.BaseRequest
    request_id: str
    parsed: ParsedBody
    ask: Ask
    body: bytes
    call: Call
    live: LiveRequest
    started_s: float
    roles: tuple[Role, ...]
    model: str  # that its workers must serve; "": any will do
    slo: Slo
    journey: Journey
    attempts: Attempts = msgspec.field(default_factory=Attempts)


class Dispatcher:
    """Answers POST /v1/chat/completions, /v1/completions, /generate and /v1/embeddings (a prefill worker's alone)."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        pd = parts.config.pd_disaggregation
        self._tails: set[Leg] = set()
        self.roles = (Role.PREFILL, Role.DECODE) if pd else (Role.UNIFIED,)
        self._embedding_roles = self.roles[:1]  # the first computes prompts, alone or not

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The handler. `BadBody` for a body that cannot be routed."""
        if self._parts.live.draining:
            return draining_response("the router is draining: it takes no new requests")
        try:
            self._parts.admission.refuse_early(request)
            live = self._parts.live.begin()
            try:
                return await self._handle(request, live)
            except asyncio.CancelledError:
                if not live.took_cancel():
                    raise
                return _handed_back()
            finally:
                self._parts.live.end(live)
        except Refused as refused:
            self._parts.metrics.refused.labels(refused.why).inc()
            return refused.response

    async def _handle(self, request: web.BaseRequest, live: LiveRequest) -> web.StreamResponse:
        started_s, request_id = self._parts.clock(), request[REQUEST_ID]
        traceparent = request.headers.get("traceparent", "")
        journey = self._parts.journeys.begin(request_id, request.path, traceparent, now_s=started_s)
        status = CLIENT_GONE
        try:
            response = await self._serve_in_turn(await self._exchange(request, live, journey, started_s))
            status = response.status
            return response
        except Refused as refused:
            status = refused.response.status
            raise
        except BadBody:
            status = 400
            raise
        finally:
            answered = 503 if live.handed_back and status == CLIENT_GONE else status
            journey.end(answered, now_s=self._parts.clock())

    async def _exchange(
        self, request: web.BaseRequest, live: LiveRequest, journey: Journey, started_s: float
    ) -> _Exchange:
        body = await request.read()
        request_id = request[REQUEST_ID]
        parsed = parse_body(Api(request.path), body)
        journey.asked(
            num_samples=parsed.num_samples,
            prompt_tokens=parsed.prompt_tokens,
            model=bytes(parsed.fields.get("model", b"")),
        )
        roles = self._embedding_roles if parsed.api is Api.EMBEDDINGS else self.roles
        try:
            model = self._model_of(parsed, roles)
        except UnknownModel as err:
            raise Refused(unknown_model(err), "model") from None
        exchange = _Exchange(
            request=request,
            request_id=request_id,
            parsed=parsed,
            ask=self._parts.chooser.ask(parsed, request.headers),
            body=body,
            call=Call(request.path, self._headers(request, request_id, journey.traceparent)),
            live=live,
            started_s=started_s,
            roles=roles,
            model=model,
            slo=self._parts.admission.slo_of(request),
            journey=journey,
        )
        journey.routed()
        return exchange

    async def _serve_in_turn(self, exchange: _Exchange) -> web.StreamResponse:
        """`_serve`, once the request may run."""
        ticket = await self._parts.admission.enter(exchange.request, exchange.parsed)
        try:
            return await self._serve(exchange)
        finally:
            self._parts.admission.leave(ticket)

    def close(self) -> None:
        """End what prefill legs still run after their clients were served."""
        for leg in tuple(self._tails):
            leg.close()

    async def _serve(self, exchange: _Exchange) -> web.StreamResponse:
        """Attempts until one answers, fails for good, or none is left."""
        config = self._parts.config
        if not self._parts.rooms.has_room_for(exchange.parsed.num_samples):
            return error_response(
                429,
                "the router has too many samples in flight",
                code="queue_full",
                headers={"Retry-After": RETRY_AFTER_S},
            )
        for attempt in range(config.retry_max + 1):
            chosen = await self._choose_soon(exchange)
            if chosen is None:
                return self._none_left(exchange)
            call = exchange.call if attempt == 0 else exchange.call.later(self._parts.clock() - exchange.started_s)
            try:
                return await self._attempt(exchange, call, chosen)
            except LegError as failure:
                exchange.attempts.note(failure, [choice.worker for choice in chosen])
                exchange.journey.attempt_failed(str(failure), now_s=self._parts.clock())
                self._note(failure)
                if not failure.retryable or attempt == config.retry_max:
                    return _failure_response(failure)
                self._parts.metrics.retries.labels(failure.reason).inc()
            await asyncio.sleep(backoff_s(attempt, base_s=config.retry_backoff_s))
        raise AssertionError("the last attempt returns")

    def _attempt(self, exchange: _Exchange, call: Call, chosen: tuple[Choice, ...]) -> Awaitable[web.StreamResponse]:
        if len(chosen) == 2:
            return self._attempt_pair(exchange, call, chosen[0], chosen[1])
        return self._attempt_single(exchange, call, chosen[0])

    async def _attempt_single(self, exchange: _Exchange, call: Call, choice: Choice) -> web.StreamResponse:
        now_s = self._parts.clock()
        trip = self._depart(choice, exchange.ask, now_s)
        lease = self._charge(choice, exchange.ask)
        leg = self._parts.legs.send(choice.worker, call, exchange.body, stream=True)
        exchange.journey.sent(leg, now_s=now_s)
        race = Race(leg)
        try:
            await race.answer(wait_for_prefill=False)
            self._tell_begun(race, trip, choice.worker)
            return await self._answer(exchange, race, trip, merger=None)
        finally:
            self._parts.admission.forecast.computed(trip)
            self._tell_end(race.answering)
            self._parts.table.release(lease)
            race.close()

    async def _attempt_pair(
        self, exchange: _Exchange, call: Call, compute: Choice, answer_by: Choice
    ) -> web.StreamResponse:
        parts, parsed = self._parts, exchange.parsed
        prefill, decode = compute.worker, answer_by.worker
        rooms = parts.rooms.mint(parsed.num_samples)
        prefill_body, decode_body = write_bodies(
            parsed, host=prefill.bootstrap_host, port=prefill.bootstrap_port, rooms=rooms
        )
        now_s = parts.clock()
        trip, answer_trip = self._depart(compute, exchange.ask, now_s), self._depart(answer_by, exchange.ask, now_s)
        prefill_lease, decode_lease = self._charge(compute, exchange.ask), self._charge(answer_by, exchange.ask)
        first = parts.legs.send(prefill, call, prefill_body, stream=False)
        second = parts.legs.send(decode, self._vouched(call, prefill, rooms), decode_body, stream=True)
        exchange.journey.sent(first, second, rooms=rooms, now_s=now_s)
        race = Race(second, prefill=first)
        # However the prefill leg ends, `race.close` at the latest; an answer that is not streamed ends long after it.
        race.when_prefill_ends(lambda: parts.table.release(prefill_lease))
        try:
            await race.answer(wait_for_prefill=parsed.wants_input_logprobs)
            self._tell_begun(race, trip, prefill, decode)
            parts.table.release(prefill_lease)  # its tokens are computed: decode would not have begun
            merger = Merger(parsed.api, first.reply.take()) if parsed.wants_input_logprobs else None
            response = await self._answer(exchange, race, answer_trip, merger=merger)
            race.finish()
            return response
        finally:
            self._tell_end(second)
            parts.admission.forecast.computed(trip)
            parts.table.release(decode_lease)
            race.close()
            self._tails.add(first)
            race.when_prefill_ends(lambda: self._end_tail(first, rooms))

    def _end_tail(self, prefill: Leg, rooms: Sequence[int]) -> None:
        """Nothing of the request runs any more, here or there."""
        self._tails.discard(prefill)
        self._tell_end(prefill)
        self._parts.rooms.release(rooms)

    async def _answer(
        self, exchange: _Exchange, race: Race, trip: Trip, *, merger: Merger | None
    ) -> web.StreamResponse:
        """Give the client the answer that has begun, whole or as a stream. `trip`: at the worker that answers."""
        leg = race.answering
        headers = _answer_headers(leg.reply.headers)
        if not leg.streaming:
            self._first_byte(exchange, self._parts.clock())
            body = leg.reply.take()
            body = merger.merge_answer(body) if merger else body
            return web.Response(status=leg.reply.status, body=body, headers=headers)
        headers["X-Request-Id"] = exchange.request_id
        headers["Cache-Control"] = "no-cache"
        race.watch_prefill(self._note)
        exchange.live.cut = leg.close
        pace, requests, clock = Pace(), requests_at(leg.worker), self._parts.clock

        def on_first(chunk: bytes) -> None:
            now_s = clock()
            self._first_byte(exchange, now_s)
            pace.on_chunk(chunk, now_s)

        def on_more(chunk: bytes) -> None:
            now_s = clock()
            exchange.journey.event(now_s)
            pace.on_chunk(chunk, now_s)

        try:
            out = await relay_stream(
                exchange.request,
                leg,
                headers=headers,
                merger=SseMerger(merger) if merger else None,
                on_first=on_first,
                on_more=on_more,
            )
        except StreamBroken as broken:
            if exchange.live.handed_back:
                return await self._end_handed_back(exchange, broken.out, race)
            return await self._end_broken(exchange, broken.out, broken.cause, race)
        if exchange.live.handed_back:
            return await self._end_handed_back(exchange, out, race)
        if race.refused is not None:
            return await self._end_broken(exchange, out, race.refused, race)
        requests_mean = (requests + requests_at(leg.worker)) / 2
        self._parts.admission.forecast.on_pace(trip, pace, requests=requests_mean, now_s=clock())
        await out.write_eof()
        return out

    async def _end_handed_back(self, exchange: _Exchange, out: web.StreamResponse, race: Race) -> web.StreamResponse:
        race.close()
        exchange.journey.broke(HANDED_BACK)
        return await end_with_event(out, error_event(HANDED_BACK, kind=error_kind(503), code=DRAINING))

    async def _end_broken(
        self, exchange: _Exchange, out: web.StreamResponse, failure: LegError, race: Race
    ) -> web.StreamResponse:
        """Say in the stream what happened; both legs end."""
        if race.refused is not None:
            failure = race.refused
        else:
            self._note(failure)
        race.close()
        exchange.journey.broke(str(failure))
        return await end_with_event(out, _failure_event(failure))

    def _vouched(self, call: Call, prefill: Worker, rooms: Sequence[int]) -> Call:
        """With our word for the bootstrap server that the body names, where there is a secret to give it by."""
        secret, port = self._parts.secret, prefill.bootstrap_port
        if secret is None or port is None:
            return call
        voucher = vouch(secret, host=prefill.bootstrap_host, port=port, rooms=rooms)
        return Call(call.path, {**call.headers, VOUCHER_HEADER: voucher})

    def _model_of(self, parsed: ParsedBody, roles: Sequence[Role]) -> str:
        """Which name its workers must serve; "": any will do. `UnknownModel`."""
        catalogue = self._parts.table.models
        if not catalogue.names:
            return ""
        ready: Iterable[str] = ()
        if catalogue.several:
            ready = (base for base in catalogue.bases if not missing_roles(self._parts.table, roles, base))
        return catalogue.meant(named_model(parsed), ready)

    async def _choose_soon(self, exchange: _Exchange) -> tuple[Choice, ...] | None:
        """As `_choose`; a request that has failed already waits a little for workers of which none is alive.

        What broke its connections may have made their health checks fail as well, and be over.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + (self._parts.config.retry_wait_s if exchange.attempts.last else 0.0)
        while True:
            chosen = self._choose(exchange)
            if chosen is not None or not self._missing(exchange) or loop.time() >= deadline_s:
                return chosen
            await asyncio.sleep(WAIT_POLL_S)

    def _choose(self, exchange: _Exchange) -> tuple[Choice, ...] | None:
        """One worker of each role as its policy says, among those best tried next; None when a role has none."""
        pools = [exchange.attempts.candidates(self._pool(role, exchange.model)) for role in exchange.roles]
        if not all(pools):
            return None  # before a policy remembers what then is sent to nobody
        if exchange.attempts.last is None and exchange.slo.is_set:  # who was let in is not turned away later
            now_s = self._parts.clock()
            pools = [self._parts.admission.in_time(p, exchange.ask, exchange.slo, now_s=now_s) for p in pools]
        return tuple([self._parts.chooser.choose(workers, exchange.ask) for workers in pools])

    def _pool(self, role: Role, model: str) -> Sequence[Worker]:
        """Who may be sent to. Circuits narrow the choice, they never empty it: where all are open, all are tried."""
        pool, now_s = self._parts.table.pool(role, model), self._parts.clock()
        return [worker for worker in pool if worker.circuit.takes(now_s)] or pool

    def _missing(self, exchange: _Exchange) -> list[Role]:
        return missing_roles(self._parts.table, exchange.roles, exchange.model)

    def _depart(self, choice: Choice, ask: Ask, now_s: float) -> Trip:
        tokens = 0 if choice.worker.role is Role.DECODE else ask.prompt_tokens - choice.cached_tokens
        return self._parts.admission.forecast.depart(choice.worker, tokens, now_s=now_s)

    def _charge(self, choice: Choice, ask: Ask) -> Lease:
        return self._parts.table.charge(choice.worker, cost_tokens(choice, ask))

    def _note(self, failure: LegError) -> None:
        """Count a failure; a worker that could not be reached is looked at."""
        reason = f"http_{failure.status}" if failure.reason == "status" else failure.reason
        self._parts.metrics.errors.labels(reason, failure.worker.role.value).inc()
        self._parts.journeys.recorder.on_failure(reason, failure.worker.role.value)
        if failure.is_fault:
            failure.worker.circuit.tell(Event.FAULT, self._parts.clock())
        if failure.reason in ("refused", "lost") or failure.draining:
            log.warning("%s", failure)
            self._parts.on_unreachable(failure)

    def _tell_begun(self, race: Race, trip: Trip, *workers: Worker) -> None:
        """The answer of `workers` has begun; `trip`: at the one that computed the prompt."""
        now_s = self._parts.clock()
        for worker in workers:
            worker.circuit.tell(Event.BEGUN, now_s)
        if race.answering.streaming:  # a whole answer says nothing about its first token
            self._parts.admission.forecast.begun(trip, now_s=now_s)

    def _tell_end(self, leg: Leg) -> None:
        """Nothing more comes. What broke was told when it did."""
        if leg.well:
            leg.worker.circuit.tell(Event.WELL, self._parts.clock())

    def _none_left(self, exchange: _Exchange) -> web.Response:
        """Nobody is alive, or who is could only fail again."""
        missing = self._missing(exchange)
        if exchange.attempts.last is not None and not missing:
            return _failure_response(exchange.attempts.last)
        self._parts.metrics.errors.labels("no_worker", ",".join(missing)).inc()
        self._parts.journeys.recorder.on_failure("no_worker", ",".join(missing))
        message = no_worker_message(self._parts.table, missing, exchange.model)
        return error_response(503, message, code="no_worker", headers={"Retry-After": RETRY_AFTER_S})

    def _first_byte(self, exchange: _Exchange, now_s: float) -> None:
        exchange.journey.first_byte(now_s)
        self._parts.metrics.on_first_byte(exchange.call.path, now_s - exchange.started_s)

    def _headers(self, request: web.BaseRequest, request_id: str, traceparent: str) -> dict[str, str]:
        """What workers get of the client's headers; `traceparent` instead of its own, where it is not ""."""
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        for name in _PASSED_HEADERS:
            value = request.headers.get(name)
            if value is not None:
                headers[name] = value
        if traceparent:
            headers["traceparent"] = traceparent
        return headers | self._parts.credentials.for_client(request.headers.get("Authorization", ""))


def draining_response(message: str) -> web.Response:
    """503 of a router that ends; another one may serve the request."""
    return error_response(503, message, code=DRAINING, headers={"Retry-After": RETRY_AFTER_S})


def _handed_back() -> web.Response:
    return draining_response(HANDED_BACK)


def no_worker_message(table: WorkerTable, missing: list[Role], model: str = "") -> str:
    """Which role is missing, and what is known of its workers."""
    known = [w for w in table.workers(missing[0]) if not model or serves(w.models, model)]
    why = "; ".join(f"{w.url}: {w.last_error or w.health.value}" for w in known[:4]) or "none was given"
    what = f"worker for model {model!r}" if model and table.models.several else "worker"
    return f"no {' and no '.join(missing)} {what} is alive ({why})"


def unknown_model(err: UnknownModel) -> web.Response:
    """404 that names the models there are."""
    return error_response(404, str(err), param="model", code="model_not_found")


def backoff_s(attempt: int, *, base_s: float) -> float:
    """Pause after failed attempt 0, 1, 2...: none, base, 2 * base..., at most `MAX_BACKOFF_S`."""
    return 0.0 if attempt == 0 else min(MAX_BACKOFF_S, base_s * 2 ** (attempt - 1))


def _failure_response(failure: LegError) -> web.Response:
    """A worker's own error as it is; else what happened to the connection."""
    if failure.reason == "status":
        headers = _answer_headers(failure.headers)
        return web.Response(status=failure.status, body=failure.body, headers=headers)
    status = 504 if failure.reason == "timeout" else 502
    return error_response(status, str(failure), code=f"worker_{failure.reason}")


def _failure_event(failure: LegError) -> bytes:
    status = failure.status or 502
    return error_event(_message_of(failure), kind=error_kind(status), code=status)


def _message_of(failure: LegError) -> str:
    """What the worker said, without the JSON around it; else what happened."""
    try:
        return msgspec.json.decode(failure.body, type=_ErrorBody).error.message
    except msgspec.MsgspecError:
        return failure.body.decode(errors="replace")[:2000] or str(failure)


class _Error(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _Error


def _answer_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[low] for low, name in _ANSWER_HEADERS.items() if low in headers}
