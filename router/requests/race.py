"""The legs of one request: the first failure ends both, the decode worker's answer wins.

Knows legs; not bodies, workers' load or the client. No tasks: both answers ring one bell (`Reply.listener`).
"""

import asyncio
from collections.abc import Callable

from router.client.upstream import UpstreamError
from router.requests.legs import Leg, LegError

TAIL_S = 5.0  # how long prefill may take to end its own answer after the client has all of decode's

GOING = 503  # a worker that ends, or whose engine died, answers what it has with this


class Bell:
    """Wakes the one who waits. Who rings while nobody waits is not heard: look first, then wait."""

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    @property
    def heard(self) -> bool:
        """Somebody waits for it."""
        return self._waiter is not None and not self._waiter.done()

    def ring(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Race:
    """A leg whose answer goes to the client (decode's, or a unified worker's), and maybe a prefill leg beside it.

    `close()` must be called, whatever happened. `bell` rings when `settled` may say something else.
    """

    def __init__(self, answering: Leg, *, prefill: Leg | None = None) -> None:
        self.answering = answering
        self.prefill = prefill
        self.refused: LegError | None = None
        self._legs = (answering,) if prefill is None else (prefill, answering)
        self.bell = Bell()
        self._wait_for_prefill = False
        self._finished = False
        self._on_prefill_end: list[Callable[[], None]] = []
        self._on_failure: Callable[[LegError], None] | None = None
        answering.reply.listener = self._ring
        if prefill is not None:
            prefill.reply.listener = self._on_prefill_change

    async def answer(self, *, wait_for_prefill: bool) -> Leg:
        """The answering leg once it is `settled`; as that one it raises."""
        while not self.settled(wait_for_prefill=wait_for_prefill):
            await self.bell.wait()
        return self.answering

    def settled(self, *, wait_for_prefill: bool) -> bool:
        """Whether the answer has begun (and, if asked, prefill's is whole). `LegError` of the leg that failed."""
        self._wait_for_prefill = wait_for_prefill
        if not self._decided():
            return False
        failures = [failure for leg in self._legs if (failure := leg.failure()) is not None]
        if failures:
            raise min(failures, key=_says_less)
        return True

    def watch_prefill(self, on_failure: Callable[[LegError], None]) -> None:
        """From here on bytes go to the client; `on_failure` is told if prefill fails yet.

        If prefill now *refuses* the request (an HTTP error), decode's answer is cut, and `refused` says by what.

        A prefill connection that merely breaks is no reason, nor is a 503, which says of the worker that it ends: decode
        may have all it needs, and its own protocol with the prefill worker knows whether it has.
        """
        self._on_failure = on_failure

    def finish(self) -> None:
        """The client has the whole answer: prefill may end its own in peace, for a while."""
        self._finished = True
        if self.prefill is not None and not self.prefill.ended:
            asyncio.get_running_loop().call_later(TAIL_S, self.prefill.close)

    def close(self, why: UpstreamError | None = None) -> None:
        """After `finish()` nothing is left to do; before it, end what still runs, with that error."""
        if not self._finished:
            self._finished = True
            for leg in self._legs:
                leg.reply.close(why)

    def when_prefill_ends(self, act: Callable[[], None]) -> None:
        """Call `act` once nothing more comes from the prefill worker; that may be now."""
        if self.prefill is None or self.prefill.ended:
            act()
        else:
            self._on_prefill_end.append(act)

    def _decided(self) -> bool:
        """Whether there is an answer, or will be none."""
        if self.answering.begun and (self.prefill is None or self.prefill.ended or not self._wait_for_prefill):
            return True
        return any([leg.failure() is not None for leg in self._legs])

    def _ring(self) -> None:
        """Wakes who waits only when it is decided: a good end of prefill, which comes first, is no news."""
        if self.bell.heard and self._decided():
            self.bell.ring()

    def _on_prefill_change(self) -> None:
        self._ring()
        prefill = self.prefill
        if prefill is None or not prefill.ended:
            return
        for act in self._on_prefill_end:
            act()
        if self._on_failure is not None and not self._finished:
            self._judge(prefill, self._on_failure)

    def _judge(self, prefill: Leg, on_failure: Callable[[LegError], None]) -> None:
        """Prefill has ended while its client is served."""
        failure = prefill.failure()
        if failure is None:
            return
        on_failure(failure)
        if failure.reason == "status" and failure.status != GOING:
            self.refused = failure
            self.answering.close()


def _says_less(err: LegError) -> tuple[bool, bool]:
    """Of two failures at once the final one (a bad request) says more than one another worker might not have; and a worker

    that is gone more than the other one's word that it lost its peer.
    """
    return err.retryable, err.reason == "status"
