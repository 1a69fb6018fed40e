"""Admission of requests: limits, priorities and SLOs."""

import asyncio
import math
from collections.abc import Iterator, Sequence

from aiohttp import web
from prometheus_client.core import GaugeMetricFamily, Metric

from router.admission.objectives import look_in_time, objectives_of
from router.admission.queue import AdmissionQueue, Ticket, TicketStatus, client_name
from router.attempts.request import (
    ITL_HEADER,
    TTFT_HEADER,
    RequestContext,
    RequestRefused,
    Serve,
    Slo,
    milliseconds,
)
from router.body import BadBody, ParsedBody, named_priority
from router.choice.policies import Placement, Policy, RoutingHints
from router.config import AdmissionFlags
from router.history.forecast import Forecast, LineFit
from router.metrics import by_worker
from router.pool.shared_load import SharedLoad
from router.pool.worker import Pool, Worker
from service.waiter import Waiter, loop_time_s

TICK_S = 0.05  # how soon room in another process is seen
PRIORITY_HEADER = "x-priority"
MAX_PRIORITY = 1 << 31


class Admission:
    """Limits of concurrency, priorities and SLOs of one process. A `ServePart`."""

    def __init__(self, config: AdmissionFlags, *, peers: SharedLoad | None = None) -> None:
        self.forecast = Forecast()
        self.queue = AdmissionQueue(config, peers)
        self._waiters: dict[int, Waiter] = {}
        self._ticker: asyncio.TimerHandle | None = None
        self._by_client = config.max_concurrent_requests_per_client > 0 or config.queue_size > 0
        self._has_slo = config.slo_ttft_s > 0 or config.slo_itl_s > 0
        self._slo = Slo(config.slo_ttft_s or math.inf, config.slo_itl_s or math.inf)

    def refuse_early(self, http: web.BaseRequest) -> None:
        """Raise RequestRefused before the body is read, if there is neither room nor queue."""
        client = self._client(http)
        if not self.queue.limits.queue_size and (self.queue.full or self.queue.client_full(client)):
            raise self._refused(client, TicketStatus.FULL)

    async def around(self, request: RequestContext, serve: Serve) -> web.StreamResponse:
        request.slo = self._slo_of(request.http)
        ticket = await self.enter(request)
        try:
            return await serve(request)
        finally:
            self.leave(ticket)

    async def enter(self, request: RequestContext) -> Ticket:
        """Wait until the request may run. `leave` must follow. Raises RequestRefused, BadBody."""
        priority = _priority(request.http, request.parsed)
        client = self._client(request.http)
        ticket, changed = self.queue.arrive(client, priority=priority, now_s=loop_time_s())
        self._wake(changed)
        try:
            if ticket.status is TicketStatus.WAITS:
                await self._wait(ticket)
            if ticket.status is not TicketStatus.RUNS:
                raise self._refused(client, ticket.status)
        except BaseException:
            self.leave(ticket)
            raise
        return ticket

    def leave(self, ticket: Ticket) -> None:
        self._wake(self.queue.leave(ticket))

    def _slo_of(self, http: web.BaseRequest) -> Slo | None:
        headers = http.headers
        if TTFT_HEADER not in headers and ITL_HEADER not in headers:
            return self._slo if self._has_slo else None
        ttft_s, itl_s = milliseconds(headers, TTFT_HEADER), milliseconds(headers, ITL_HEADER)
        return Slo(self._slo.ttft_s if ttft_s is None else ttft_s, self._slo.itl_s if itl_s is None else itl_s)

    def look_in_time(self, policy: Policy, pool: Pool, hints: RoutingHints, slo: Slo, now_s: float) -> Placement:
        objectives = objectives_of(slo, pool[0].role, hints, self.forecast)
        return look_in_time(policy, pool, hints, objectives, now_s=now_s) if objectives else policy.look(pool, hints)

    def metrics(self, workers: Sequence[Worker]) -> Iterator[Metric]:
        fits, text = self.forecast.fits, "Requests that wait for their turn (--queue-size)"
        yield GaugeMetricFamily("tandem_router_waiting_requests", text, value=self.queue.num_waiting)
        for name, text, value in (
            ("ttft_base_seconds", "Foretold TTFT with nothing to compute", lambda w: _known(fits(w)[0], "intercept")),
            ("ttft_seconds_per_token", "... and for each token ahead", lambda w: _known(fits(w)[0], "slope")),
            ("itl_base_seconds", "Foretold time between events, alone", lambda w: _known(fits(w)[1], "intercept")),
            ("itl_seconds_per_request", "... and for each request there", lambda w: _known(fits(w)[1], "slope")),
        ):
            yield by_worker(workers, f"forecast_{name}", text, value)

    async def _wait(self, ticket: Ticket) -> None:
        waiter = self._waiters[id(ticket)] = Waiter()
        self._tick_soon()
        try:
            await waiter.wait()
        finally:
            del self._waiters[id(ticket)]

    def _wake(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            waiter = self._waiters.get(id(ticket))
            if waiter is not None:
                waiter.wake()

    def _tick_soon(self) -> None:
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        self._wake(self.queue.tick(loop_time_s()))
        if self.queue.num_waiting:
            self._tick_soon()

    def _refused(self, client: str, status: TicketStatus) -> RequestRefused:
        limits = self.queue.limits
        if status is TicketStatus.LATE:
            why, message = "queue_timeout", f"no room in {limits.queue_timeout_s:g} s (--queue-timeout-secs)"
        elif self.queue.client_full(client):
            why = "client_limit"
            most = limits.max_concurrent_requests_per_client
            message = f"this client has {most} requests here (--max-concurrent-requests-per-client)"
        else:
            why, most = "queue_full", limits.max_concurrent_requests
            message = f"the router serves {most} requests (--max-concurrent-requests)"
        return RequestRefused(f"{message}; try again later", why=why)

    def _client(self, http: web.BaseRequest) -> str:
        return client_name(http) if self._by_client else ""


def _priority(http: web.BaseRequest, parsed: ParsedBody) -> int:
    named = named_priority(parsed)
    text = http.headers.get(PRIORITY_HEADER)
    if named is None and text is not None:
        try:
            named = int(text)
        except ValueError:
            raise BadBody(None, f"{PRIORITY_HEADER}: must be an integer, got {text[:40]!r}") from None
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, named or 0))


def _known(fit: LineFit, what: str) -> float | None:
    return getattr(fit, what) if fit.is_known else None
