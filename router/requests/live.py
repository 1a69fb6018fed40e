"""Live requests of a router, drain and block.

A drain refuses new requests; live ones finish or are handed back. A block holds new ones while live
ones finish, to change all workers in between, as SGLang's input blocker.
"""

import asyncio
import logging
import math
from dataclasses import dataclass, field

from aiohttp import web

from router.attempts.request import RequestContext
from router.requests.relay import draining
from service.http.errors import ApiError
from service.process.stop_signals import wait_while

MAX_BLOCKED = 4096  # requests waiting in a block

log = logging.getLogger(__name__)


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

    def refuse_if_draining(self, http: web.BaseRequest) -> None:
        if self.draining:
            raise draining("the router is draining: it takes no new requests")

    async def block(self) -> None:
        """Hold new requests until `unblock`, and wait for live ones."""
        self._open.clear()
        await wait_while(lambda: bool(self.requests), at_once=self._open)

    def unblock(self) -> None:
        self._open.set()

    async def wait_unblocked(self, *, timeout_s: float) -> None:
        """Wait for the block's end. ApiError after the deadline, or for too many requests."""
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
