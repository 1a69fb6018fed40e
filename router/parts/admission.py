r"""Admission of requests: limits, priorities and SLOs.

A queue limits running requests in all and per client. Pure:

    arrive --> room: runs ------------------------------> over
           \-> waits by priority, then arrival --> runs
                   \-> refused: queue full, or waited too long

A full queue drops the latest request of lowest priority from the client with most of them. Limits
count all router processes, queues are per process.

A request with an SLO goes to the policy's choice among workers predicted to meet it: of the whole
pool, of `Policy.some`, a worker with a stale measurement; else it is refused. Early refusal:
Mooncake (FAST'25). SLO per pool: DistServe (OSDI'24).
"""

import asyncio
import ipaddress
import math
import time
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fastapi import Response
from prometheus_client.core import GaugeMetricFamily, Metric

from router.attempts.request import ITL_HEADER, TTFT_HEADER, RequestContext, RequestRefused, Serve, Slo, milliseconds
from router.body import BadBody, ParsedBody, named_priority
from router.choice.policies import Placement, Policy, RoutingHints, WithPages
from router.config import AdmissionFlags
from router.history.forecast import STALE_S, Forecast, LineFit
from router.history.metrics import by_worker
from router.pool.shared_load import SharedLoad
from router.pool.worker import Pool, Role, Worker
from service.http.errors import ApiError
from service.http.guard import CALLER
from service.http.request import HttpRequest
from service.security.keys import Access
from service.waiter import Waiter, loop_time_s


class TicketStatus(StrEnum):
    WAITS = "waits"
    RUNS = "runs"
    FULL = "full"  # refused: no room in the queue
    LATE = "late"  # refused: waited for `queue_timeout_s`
    OVER = "over"


@dataclass(slots=True, order=True)
class Ticket:
    """A request since its arrival; sorts in queue order."""

    _rank: tuple[int, int]  # (-priority, arrival)
    client: str = field(compare=False)
    since_s: float = field(compare=False)
    status: TicketStatus = field(default=TicketStatus.WAITS, compare=False)


class AdmissionQueue:
    """Calls return other tickets that changed."""

    def __init__(self, limits: AdmissionFlags, peers: SharedLoad | None = None) -> None:
        self.limits = limits
        self._peers = peers
        self._waiting: list[Ticket] = []
        self.num_running = 0
        self._of_client: Counter[str] = Counter()  # running requests
        self._num_arrived = 0

    @property
    def num_everywhere(self) -> int:
        return self.num_running + (0 if self._peers is None else self._peers.others_live())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        return self.num_everywhere >= self.limits.max_concurrent_requests

    def client_full(self, client: str) -> bool:
        limit = self.limits.max_concurrent_requests_per_client
        if not limit:
            return False
        others = 0 if self._peers is None else self._peers.others_of_client(client)
        return self._of_client[client] + others >= limit

    def arrive(self, client: str, *, priority: int, now_s: float) -> tuple[Ticket, list[Ticket]]:
        self._num_arrived += 1
        ticket = Ticket((-priority, self._num_arrived), client, now_s)
        if not self._waiting and not self.full and not self.client_full(client):  # shortcut with the same result
            self._count(client, 1)
            ticket.status = TicketStatus.RUNS
            return ticket, []
        insort(self._waiting, ticket)
        changed = self._admit()
        if len(self._waiting) > self.limits.queue_size:
            changed.append(self._drop_last())
        return ticket, [other for other in changed if other is not ticket]

    def leave(self, ticket: Ticket) -> list[Ticket]:
        if ticket.status is TicketStatus.RUNS:
            self._count(ticket.client, -1)
        elif ticket.status is TicketStatus.WAITS:
            self._waiting.remove(ticket)
        ticket.status = TicketStatus.OVER
        return self._admit()

    def tick(self, now_s: float) -> list[Ticket]:
        """Refuse late tickets, and admit others if peer processes made room."""
        late = [t for t in self._waiting if now_s - t.since_s >= self.limits.queue_timeout_s]
        for ticket in late:
            self._waiting.remove(ticket)
            ticket.status = TicketStatus.LATE
        return late + self._admit()

    def check(self) -> None:
        assert self.num_running == self._of_client.total() >= 0, (self.num_running, self._of_client)
        assert self._waiting == sorted(self._waiting) and len(self._waiting) <= self.limits.queue_size
        assert all(ticket.status is TicketStatus.WAITS for ticket in self._waiting)

    def _admit(self) -> list[Ticket]:
        admitted: list[Ticket] = []
        for ticket in tuple(self._waiting):
            if self.full:
                break
            if not self.client_full(ticket.client):
                self._waiting.remove(ticket)
                self._count(ticket.client, 1)
                ticket.status = TicketStatus.RUNS
                admitted.append(ticket)
        return admitted

    def _drop_last(self) -> Ticket:
        last = self._waiting[-1]
        lowest = [ticket for ticket in self._waiting if ticket._rank[0] == last._rank[0]]
        waiting = Counter(ticket.client for ticket in lowest)
        most = max(waiting.values())
        dropped = next(ticket for ticket in reversed(lowest) if waiting[ticket.client] == most)
        self._waiting.remove(dropped)
        dropped.status = TicketStatus.FULL
        return dropped

    def _count(self, client: str, step: int) -> None:
        self.num_running += step
        self._of_client[client] += step
        if not self._of_client[client]:
            del self._of_client[client]
        if self._peers is not None:
            self._peers.publish_live(self.num_running)
            if self.limits.max_concurrent_requests_per_client:
                self._peers.add_client(client, step)


# ---- Rate limits per client by token buckets.

MAX_CLIENTS = 65536  # beyond it, the client that was quiet longest is forgotten
IPV6_SITE_BITS = 64  # prefix of one subscriber, a single client


@dataclass(slots=True)
class RateLimiter:
    """Token buckets: `per_s` requests a second, `burst` at once."""

    per_s: float
    burst: int
    _buckets: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)  # name -> (tokens, at)

    def __post_init__(self) -> None:
        assert self.per_s > 0 and self.burst >= 1, (self.per_s, self.burst)

    def wait_s(self, client: str, now_s: float) -> float:
        """Take a token, or return the seconds until the next."""
        tokens, at_s = self._buckets.pop(client, (float(self.burst), now_s))
        tokens = min(float(self.burst), tokens + max(0.0, now_s - at_s) * self.per_s)
        missing = max(0.0, 1.0 - tokens)
        self._buckets[client] = (tokens if missing else tokens - 1.0, now_s)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return missing / self.per_s


def make_limiter(per_s: float, burst: int) -> RateLimiter | None:
    """A limiter, None without limit. The default burst is two seconds of requests."""
    return None if per_s <= 0 else RateLimiter(per_s, burst or max(1, round(2 * per_s)))


def client_of(remote: str | None) -> str:
    """An IPv4 address, or an IPv6 site."""
    try:
        address = ipaddress.ip_address(remote or "")
    except ValueError:
        return remote or ""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, IPV6_SITE_BITS), strict=False))
    return str(address)


def client_name(http: HttpRequest) -> str:
    """The name of the API key, else the address."""
    return http[CALLER].name or client_of(http.remote)


def limit_rate(
    limiter: RateLimiter, on_refused: Callable[[str], None]
) -> Callable[[HttpRequest, Access], ApiError | None]:
    """A client above its rate is refused, except on open routes."""

    def admit(request: HttpRequest, need: Access) -> ApiError | None:
        if need is Access.NONE:
            return None
        wait_s = limiter.wait_s(client_name(request), time.monotonic())
        if wait_s == 0.0:
            return None
        on_refused("rate")
        message = "too many requests from this client (--rate-limit-requests-per-second)"
        return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=math.ceil(wait_s))

    return admit


_NAMES = {"ttft": "the first token", "itl": "the time between tokens"}


@dataclass(frozen=True, slots=True)
class Objective:
    """`what`: "ttft" or "itl". `size`: the request's tokens, or 1. `whole`: one worker does all."""

    what: str
    wanted_s: float
    size: float
    forecast: Forecast
    whole: bool = False

    def fit(self, worker: Worker) -> LineFit:
        if self.what == "itl":
            return self.forecast.answer_line(worker, whole=self.whole)
        whole = self.forecast.line(worker, whole=self.whole)
        return whole if whole.is_known else self.forecast.fits(worker)[0]

    def predicted_s(self, choice: Placement) -> float | None:
        worker, size, source = choice.worker, self.size, choice.source
        if self.what == "itl":
            return self.fit(worker).at(size + worker.num_answers)
        at_s = self.fit(worker).at(size + self.forecast.waiting_tokens(worker) - choice.known_tokens)
        return at_s if at_s is None or source is None else at_s + source.seconds

    def keeps(self, choice: Placement) -> bool:
        at_s = self.predicted_s(choice)
        return at_s is None or at_s <= self.wanted_s

    def is_stale(self, worker: Worker, now_s: float) -> bool:
        return now_s - self.fit(worker).news_s >= STALE_S

    def refusal(self, predicted_s: float) -> RequestRefused:
        what, wanted_s = self.what, self.wanted_s
        message = (
            f"{_NAMES[what]} would take about {predicted_s * 1000:.0f} ms, more than the {wanted_s * 1000:.0f} ms asked for "
            f"(--slo-{what}-ms, X-SLO-{what.upper()}-ms); try again later"
        )
        retry_after_s = max(1, math.ceil(min(60.0, predicted_s - wanted_s)))
        return RequestRefused(message, why=f"slo_{what}", retry_after_s=retry_after_s)


def objectives_of(
    slo: Slo, role: Role, hints: RoutingHints, forecast: Forecast, *, whole: bool = False
) -> list[Objective]:
    found = []
    if (whole or role is not Role.DECODE) and slo.ttft_s < math.inf:
        found.append(Objective("ttft", slo.ttft_s, hints.prompt_tokens, forecast, whole))
    if (whole or role is not Role.PREFILL) and slo.itl_s < math.inf:
        found.append(Objective("itl", slo.itl_s, 1, forecast, whole))
    return found


def look_in_time(
    policy: Policy,
    pool: Pool,
    hints: RoutingHints,
    objectives: Sequence[Objective],
    *,
    now_s: float,
    with_pages: WithPages = lambda seen, hints: seen,
) -> Placement:
    """The policy's choice within all SLOs, perhaps `with_pages`. Raises RequestRefused."""
    choice = policy.look(pool, hints)
    if all([objective.keeps(choice) for objective in objectives]):
        return choice
    seen = with_pages(policy.some(pool, hints), hints)
    kept = [one.worker for one in seen if all([objective.keeps(one) for objective in objectives])]
    return policy.look(kept, hints) if kept else _one_to_try(seen, objectives, now_s)


def _one_to_try(seen: Sequence[Placement], objectives: Sequence[Objective], now_s: float) -> Placement:
    """The worker measured longest ago, once, if its line is stale."""
    for objective in objectives:
        for choice in sorted(seen, key=lambda one: objective.fit(one.worker).news_s):
            if not objective.is_stale(choice.worker, now_s):
                break
            missed = [one for one in objectives if not one.keeps(choice)]
            if all([one.is_stale(choice.worker, now_s) for one in missed]):
                for one in missed:
                    one.forecast.note_try(one.fit(choice.worker), now_s)
                return choice
    raise _refusal(seen, objectives)


def _refusal(seen: Sequence[Placement], objectives: Sequence[Objective]) -> RequestRefused:
    for objective in objectives:
        late_s = [objective.predicted_s(one) or 0.0 for one in seen if not objective.keeps(one)]
        if len(late_s) == len(seen):
            break
    return objective.refusal(min(late_s))


TICK_S = 0.05  # how soon room in another process is seen
PRIORITY_HEADER = "x-priority"
MAX_PRIORITY = 1 << 31


class Admission:
    """A `ServePart`."""

    def __init__(self, config: AdmissionFlags, *, peers: SharedLoad | None = None) -> None:
        self.forecast = Forecast()
        self.queue = AdmissionQueue(config, peers)
        self._waiters: dict[int, Waiter] = {}
        self._ticker: asyncio.TimerHandle | None = None
        self._by_client = config.max_concurrent_requests_per_client > 0 or config.queue_size > 0
        self._has_slo = config.slo_ttft_s > 0 or config.slo_itl_s > 0
        self._slo = Slo(config.slo_ttft_s or math.inf, config.slo_itl_s or math.inf)

    def refuse_early(self, http: HttpRequest) -> None:
        """Raises RequestRefused, before the body is read."""
        client = self._client(http)
        if not self.queue.limits.queue_size and (self.queue.full or self.queue.client_full(client)):
            raise self._refused(client, TicketStatus.FULL)

    async def around(self, request: RequestContext, serve: Serve) -> Response:
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

    def _slo_of(self, http: HttpRequest) -> Slo | None:
        headers = http.headers
        if TTFT_HEADER not in headers and ITL_HEADER not in headers:
            return self._slo if self._has_slo else None
        ttft_s, itl_s = milliseconds(headers, TTFT_HEADER), milliseconds(headers, ITL_HEADER)
        return Slo(self._slo.ttft_s if ttft_s is None else ttft_s, self._slo.itl_s if itl_s is None else itl_s)

    def look_in_time(
        self,
        policy: Policy,
        pool: Pool,
        hints: RoutingHints,
        slo: Slo,
        now_s: float,
        whole: bool,
        with_pages: WithPages,
    ) -> Placement:
        objectives = objectives_of(slo, pool[0].role, hints, self.forecast, whole=whole)
        return look_in_time(policy, pool, hints, objectives, now_s=now_s, with_pages=with_pages)

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

    def _client(self, http: HttpRequest) -> str:
        return client_name(http) if self._by_client else ""


def _priority(http: HttpRequest, parsed: ParsedBody) -> int:
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
