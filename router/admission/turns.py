"""Holds requests until the admission queue (queue.py) lets them run."""

import asyncio

from router.admission.queue import AdmissionQueue, Ticket, TicketStatus
from router.config import AdmissionFlags
from router.pool.shared_load import SharedLoad
from service.http.errors import ApiError
from service.waiter import Waiter, loop_time_s

TICK_S = 0.05  # how soon room in another process is seen


class RequestRefused(ApiError):
    """The request may not run. `why`: in metrics, and the error's code."""

    def __init__(self, message: str, *, why: str, status: int = 429, retry_after_s: int = 1) -> None:
        super().__init__(status, message, code=why, retry_after_s=retry_after_s)
        self.why = why


class Turns:
    def __init__(self, limits: AdmissionFlags, peers: SharedLoad | None = None) -> None:
        self.queue = AdmissionQueue(limits, peers)
        self._waiters: dict[int, Waiter] = {}
        self._ticker: asyncio.TimerHandle | None = None

    def refuse_early(self, client: str) -> None:
        """Refuse before the body is read, if requests never wait and there is no room. `RequestRefused`."""
        if not self.queue.limits.queue_size and (self.queue.full or self.queue.client_full(client)):
            raise self._refused(client, TicketStatus.FULL)

    async def enter(self, client: str, *, priority: int) -> Ticket:
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
