"""Holds requests at the door until the line lets them run. Owns the futures that they wait for; decides nothing (line.py)."""

import asyncio

from aiohttp import web

from router.admission.line import Limits, Line, Stand, Ticket
from router.pool.peer_load import PeerLoad
from service.http.errors import error_response

TICK_S = 0.05  # how soon room that another process made is seen
RETRY_AFTER_S = "1"


class Refused(Exception):
    """The request may not run; `response` says why."""

    def __init__(self, response: web.Response, why: str) -> None:
        super().__init__(why)
        self.response, self.why = response, why


class Door:
    def __init__(self, limits: Limits, peers: PeerLoad | None = None) -> None:
        self.line = Line(limits, peers)
        self._bells: dict[int, asyncio.Future[None]] = {}  # of those that wait
        self._ticker: asyncio.TimerHandle | None = None

    def refuse_early(self, client: str) -> None:
        """`Refused` where it is plain before the request was read: nobody ever waits, and there is no room."""
        if not self.line.limits.queue and (self.line.full or self.line.client_full(client)):
            raise self._refused(client, Stand.FULL)

    async def enter(self, client: str, *, priority: int) -> Ticket:
        """Waits for the request's turn. `Refused`. Who is in must `leave`. (No context manager: those cost a tenth of a request.)"""
        ticket, changed = self.line.arrive(client, priority=priority, now_s=_now_s())
        self._ring(changed)
        try:
            if ticket.stand is Stand.WAITS:
                await self._wait(ticket)
            if ticket.stand is not Stand.RUNS:
                raise self._refused(client, ticket.stand)
        except BaseException:
            self.leave(ticket)
            raise
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The request is over."""
        self._ring(self.line.leave(ticket))

    async def _wait(self, ticket: Ticket) -> None:
        bell = self._bells[id(ticket)] = asyncio.get_running_loop().create_future()
        self._tick_soon()
        try:
            await bell
        finally:
            del self._bells[id(ticket)]

    def _ring(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            bell = self._bells.get(id(ticket))
            if bell is not None and not bell.done():
                bell.set_result(None)

    def _tick_soon(self) -> None:
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        self._ring(self.line.tick(_now_s()))
        if self.line.num_waiting:
            self._tick_soon()

    def _refused(self, client: str, stand: Stand) -> Refused:
        limits = self.line.limits
        if stand is Stand.LATE:
            why, message = "queue_timeout", f"no room in {limits.queue_timeout_s:g} s (--queue-timeout-secs)"
        elif self.line.client_full(client):
            why = "client_limit"
            message = f"this client has {limits.per_client} requests here (--max-concurrent-requests-per-client)"
        else:
            why, message = "queue_full", f"the router serves {limits.running} requests (--max-concurrent-requests)"
        response = error_response(429, f"{message}; try again later", code=why, headers={"Retry-After": RETRY_AFTER_S})
        return Refused(response, why)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
