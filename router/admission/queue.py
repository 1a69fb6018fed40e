r"""The admission queue, with limits in all and per client. Pure.

    arrive --> room: runs ------------------------------> over
           \-> waits by priority, then arrival --> runs
                   \-> refused: queue full, or waited too long

A full queue drops the latest request of lowest priority from the client with most of them: a
flooding client displaces itself. Limits count all router processes, queues are per process.
"""

import ipaddress
import math
import time
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from aiohttp import web

from router.config import AdmissionFlags
from router.pool.shared_load import SharedLoad
from service.http.errors import ApiError
from service.http.guard import CALLER
from service.security.keys import Access


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
    """The tickets of one process. Calls return other tickets that changed."""

    def __init__(self, limits: AdmissionFlags, peers: SharedLoad | None = None) -> None:
        self.limits = limits
        self._peers = peers
        self._waiting: list[Ticket] = []
        self._running = 0
        self._of_client: Counter[str] = Counter()  # running requests
        self._num_arrived = 0

    @property
    def num_running(self) -> int:
        return self._running

    @property
    def num_everywhere(self) -> int:
        return self._running + (0 if self._peers is None else self._peers.others_live())

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
        """Return the new ticket, and others that changed."""
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
        assert self._running == self._of_client.total() >= 0, (self._running, self._of_client)
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
        self._running += step
        self._of_client[client] += step
        if not self._of_client[client]:
            del self._of_client[client]
        if self._peers is not None:
            self._peers.publish_live(self._running)
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
    """Return a limiter, None without limit. The default burst is two seconds of requests."""
    return None if per_s <= 0 else RateLimiter(per_s, burst or max(1, round(2 * per_s)))


def client_of(remote: str | None) -> str:
    """Return the client at an address: IPv4 address or IPv6 site."""
    try:
        address = ipaddress.ip_address(remote or "")
    except ValueError:
        return remote or ""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, IPV6_SITE_BITS), strict=False))
    return str(address)


def client_name(http: web.BaseRequest) -> str:
    """Return the client for limits: its API key's name, else its address."""
    return http[CALLER].name or client_of(http.remote)


def limit_rate(
    limiter: RateLimiter, on_refused: Callable[[str], None]
) -> Callable[[web.BaseRequest, Access], ApiError | None]:
    """Return a check that refuses a client above its rate, except on open routes."""

    def admit(request: web.BaseRequest, need: Access) -> ApiError | None:
        if need is Access.NONE:
            return None
        wait_s = limiter.wait_s(client_name(request), time.monotonic())
        if wait_s == 0.0:
            return None
        on_refused("rate")
        message = "too many requests from this client (--rate-limit-requests-per-second)"
        return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=math.ceil(wait_s))

    return admit
