"""The live requests of a router, and its drain: nothing new is taken, what runs is finished or handed back."""

import asyncio
import logging
from dataclasses import dataclass, field

from router.attempts.request import RequestContext
from service.process.stop_signals import wait_while

log = logging.getLogger(__name__)


@dataclass(eq=False)
class LiveRequests:
    """The requests that run or wait for their turn, in order of arrival."""

    draining: bool = False
    requests: dict[RequestContext, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.requests)

    async def drain(self, *, timeout_s: float, at_once: asyncio.Event) -> None:
        self.draining = True
        if self.requests:
            log.info("draining: %d requests run, for up to %g s (--drain-timeout)", len(self), timeout_s)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        await wait_while(lambda: bool(self.requests) and loop.time() < deadline_s, at_once=at_once)
        if self.requests:
            log.warning("draining: %d requests have not ended and are handed back", len(self))
        for request in list(self.requests):
            request.hand_back()
