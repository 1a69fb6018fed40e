"""Serves one generation request: reads it, waits for its turn, tries pairs until one answers, and passes the answer on.

A request may move to other workers only while nothing was sent to the client. Who is tried is picking.py's affair, what an
attempt takes attempt.py's, two of them at a time contest.py's: every way out of here ends the attempts that run.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from router.admission.admission import PRIORITY_HEADER, Admission
from router.admission.door import Refused
from router.admission.forecast import ITL_HEADER, TTFT_HEADER, Pace
from router.body import Api, BadBody, ParsedBody, parse_body
from router.choice.chooser import Chooser
from router.client.credentials import Credentials
from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.pool.breaker import Event
from router.pool.models import UnknownModel
from router.pool.worker import Role
from router.pool.workers import WorkerTable
from router.requests.attempt import Attempt, Launcher
from router.requests.contest import Contest
from router.requests.exchange import Exchange
from router.requests.hedging import Hedging
from router.requests.journey import Journey, Journeys
from router.requests.legs import Call, LegError, Legs
from router.requests.live import LiveRequest, LiveRequests
from router.requests.merge import Merger, SseMerger
from router.requests.picking import Chosen, Picker
from router.requests.race import Race
from router.requests.relay import StreamBroken, end_with_event, relay_stream
from router.requests.replies import (
    HANDED_BACK,
    answer_headers,
    draining_response,
    failure_event,
    failure_response,
    handed_back_event,
    no_worker_message,
    no_worker_response,
    too_many_samples,
    unknown_model,
)
from router.requests.rooms import RoomMinter
from service.http.deadline import ENVOY_HEADER, TIMEOUT_HEADER
from service.http.errors import ApiError
from service.http.guard import CLIENT_GONE
from service.http.stream import REQUEST_ID

log = logging.getLogger(__name__)

MAX_BACKOFF_S = 1.0

_PASSED_HEADERS = (
    "traceparent",
    "tracestate",
    TIMEOUT_HEADER,
    ENVOY_HEADER,
    PRIORITY_HEADER,
    TTFT_HEADER,
    ITL_HEADER,
)


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


class Dispatcher:
    """Answers POST /v1/chat/completions, /v1/completions, /generate and /v1/embeddings (a prefill worker's alone)."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        config, pd = parts.config, parts.config.pd_disaggregation
        self.launcher = Launcher(
            table=parts.table,
            rooms=parts.rooms,
            legs=parts.legs,
            forecast=parts.admission.forecast,
            secret=parts.secret,
            clock=parts.clock,
        )
        self._picker = Picker(
            table=parts.table,
            chooser=parts.chooser,
            admission=parts.admission,
            wait_s=config.retry_wait_s,
            silence_s=config.dead_worker_timeout_s,
            clock=parts.clock,
        )
        after_s = config.hedge_after_s
        self._hedging = Hedging(after_s=after_s, share=config.hedge_budget) if after_s else None
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
                return draining_response(HANDED_BACK)
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
        except ApiError as error:
            status = error.status
            raise
        finally:
            answered = 503 if live.handed_back and status == CLIENT_GONE else status
            journey.end(answered, now_s=self._parts.clock())

    async def _exchange(
        self, request: web.BaseRequest, live: LiveRequest, journey: Journey, started_s: float
    ) -> Exchange:
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
            model = self._picker.model_of(parsed, roles)
        except UnknownModel as err:
            raise Refused(unknown_model(err), "model") from None
        exchange = Exchange(
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
            hedge_after_s=None if self._hedging is None else _hedge_after_s(self._hedging, request, parsed),
            journey=journey,
        )
        journey.routed()
        return exchange

    async def _serve_in_turn(self, exchange: Exchange) -> web.StreamResponse:
        """`_serve`, once the request may run."""
        ticket = await self._parts.admission.enter(exchange.request, exchange.parsed)
        try:
            return await self._serve(exchange)
        finally:
            self._parts.admission.leave(ticket)

    def close(self) -> None:
        """End what prefill legs still run after their clients were served."""
        self.launcher.close()

    async def _serve(self, exchange: Exchange) -> web.StreamResponse:
        """Attempts until one answers, fails for good, or none is left."""
        config = self._parts.config
        if not self._parts.rooms.has_room_for(exchange.parsed.num_samples):
            return too_many_samples()
        for number in range(config.retry_max + 1):
            chosen, is_late = self._picker.pick(exchange), number > 0
            if chosen is None:
                chosen, is_late = await self._picker.pick_later(exchange), True
            if chosen is None:
                return self._none_left(exchange)
            call = self._call_again(exchange) if is_late else exchange.call
            try:
                return await self._attempt(exchange, call, chosen)
            except LegError as failure:
                if not failure.retryable or number == config.retry_max:
                    return failure_response(failure)
                self._parts.metrics.retries.labels(failure.reason).inc()
            await asyncio.sleep(backoff_s(number, base_s=config.retry_backoff_s))
        raise AssertionError("the last attempt returns")

    def _call_again(self, exchange: Exchange) -> Call:
        """For an attempt that begins later: the request has less time by now."""
        return exchange.call.later(self._parts.clock() - exchange.started_s)

    async def _attempt(self, exchange: Exchange, call: Call, chosen: Chosen) -> web.StreamResponse:
        """One attempt to its end, or to that of its hedge. `LegError`: nobody answered, and whoever failed was told of."""
        attempt = self.launcher.begin(exchange, call, chosen)
        if exchange.hedge_after_s is not None:
            return await self._attempt_hedged(exchange, attempt, exchange.hedge_after_s)
        try:
            await attempt.race.answer(wait_for_prefill=exchange.parsed.wants_input_logprobs)
            return await self._give(exchange, attempt)
        except LegError as failure:
            self._on_failed(exchange, attempt, failure)
            raise
        finally:
            attempt.end()

    async def _attempt_hedged(self, exchange: Exchange, first: Attempt, after_s: float) -> web.StreamResponse:
        contest = Contest(
            first,
            on_failed=lambda attempt, failure: self._on_failed(exchange, attempt, failure),
            on_lost=lambda lost: exchange.journey.attempt_cancelled(lost.told, now_s=self._parts.clock()),
        )
        won = "lost"
        try:
            winner = await contest.winner(
                lambda: self._hedge(exchange, first),
                after_s=after_s,
                wait_for_prefill=exchange.parsed.wants_input_logprobs,
            )
            won = "won" if winner is contest.hedge else "lost"
            contest.end(winner)
            return await self._give(exchange, winner)
        finally:
            contest.end()
            if contest.hedge is not None:
                self._parts.metrics.hedges.labels(won).inc()

    def _hedge(self, exchange: Exchange, first: Attempt) -> Attempt | None:
        """A second attempt beside the first, which keeps silent; None where it may not be. A request has one chance."""
        assert self._hedging is not None
        exchange.hedge_after_s = None
        pools = self._picker.other_pools(exchange, first.workers)
        why = self._hedging.withheld(waiting=self._parts.admission.door.line.num_waiting > 0, pools=pools)
        if why is not None or pools is None:
            self._parts.metrics.hedges_withheld.labels(why).inc()
            return None
        self._parts.metrics.hedges.labels("started").inc()
        chosen = self._picker.choose(exchange, pools)
        return self.launcher.begin(exchange, self._call_again(exchange), chosen, hedge=True)

    async def _give(self, exchange: Exchange, attempt: Attempt) -> web.StreamResponse:
        """Its answer has begun: the client gets it."""
        attempt.begun()
        prefill = attempt.race.prefill
        wants = prefill is not None and exchange.parsed.wants_input_logprobs
        merger = Merger(exchange.parsed.api, prefill.reply.take()) if wants and prefill is not None else None
        response = await self._answer(exchange, attempt, merger=merger)
        if prefill is not None:
            attempt.race.finish()
        return response

    def _on_failed(self, exchange: Exchange, attempt: Attempt, failure: LegError) -> None:
        exchange.attempts.note(failure, attempt.workers)
        exchange.journey.attempt_failed(str(failure), attempt.told, now_s=self._parts.clock())
        self._note(failure)

    async def _answer(self, exchange: Exchange, attempt: Attempt, *, merger: Merger | None) -> web.StreamResponse:
        """Give the client the answer that has begun, whole or as a stream."""
        race = attempt.race
        leg = race.answering
        headers = answer_headers(leg.reply.headers)
        if not leg.streaming:
            self._first_byte(exchange, self._parts.clock())
            body = leg.reply.take()
            body = merger.merge_answer(body) if merger else body
            return web.Response(status=leg.reply.status, body=body, headers=headers)
        headers["Cache-Control"] = "no-cache"
        race.watch_prefill(self._note)
        exchange.live.cut = leg.close
        pace, requests, clock = Pace(), leg.worker.requests_everywhere, self._parts.clock

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
        requests_mean = (requests + leg.worker.requests_everywhere) / 2
        self._parts.admission.forecast.on_pace(attempt.answer_trip, pace, requests=requests_mean, now_s=clock())
        await out.write_eof()
        return out

    async def _end_handed_back(self, exchange: Exchange, out: web.StreamResponse, race: Race) -> web.StreamResponse:
        race.close()
        exchange.journey.broke(HANDED_BACK)
        return await end_with_event(out, handed_back_event())

    async def _end_broken(
        self, exchange: Exchange, out: web.StreamResponse, failure: LegError, race: Race
    ) -> web.StreamResponse:
        """Say in the stream what happened; both legs end."""
        if race.refused is not None:
            failure = race.refused
        else:
            self._note(failure)
        race.close()
        exchange.journey.broke(str(failure))
        return await end_with_event(out, failure_event(failure))

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

    def _none_left(self, exchange: Exchange) -> web.Response:
        """Nobody is alive, or who is could only fail again."""
        missing = self._picker.missing(exchange)
        if exchange.attempts.last is not None and not missing:
            return failure_response(exchange.attempts.last)
        self._parts.metrics.errors.labels("no_worker", ",".join(missing)).inc()
        self._parts.journeys.recorder.on_failure("no_worker", ",".join(missing))
        message = no_worker_message(self._parts.table, missing, exchange.model)
        return no_worker_response(message)

    def _first_byte(self, exchange: Exchange, now_s: float) -> None:
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


def _hedge_after_s(hedging: Hedging, request: web.BaseRequest, parsed: ParsedBody) -> float | None:
    """How long this request's answer may keep silent. `BadBody`."""
    try:
        return hedging.after_s(request.headers, streams=parsed.streams)
    except ValueError as err:
        raise BadBody(None, str(err)) from None


def backoff_s(attempt: int, *, base_s: float) -> float:
    """Pause after failed attempt 0, 1, 2...: none, base, 2 * base..., at most `MAX_BACKOFF_S`."""
    return 0.0 if attempt == 0 else min(MAX_BACKOFF_S, base_s * 2 ** (attempt - 1))
