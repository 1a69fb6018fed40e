"""Both legs of one request as tasks: the first failure ends both, the decode worker's answer wins.

Knows tasks and leg errors; not bodies, workers' load or the client.
"""

import asyncio
from collections.abc import Callable

from router.legs import Answer, LegError

TAIL_S = 5.0  # how long prefill may take to end its own answer after the client has all of decode's

GOING = 503  # a worker that ends, or whose engine died, answers what it has with this


class Race:
    """A prefill and a decode leg, running. `close()` must be called, whatever happened."""

    def __init__(self, prefill: "asyncio.Task[bytes]", decode: "asyncio.Task[Answer]") -> None:
        self.prefill = prefill
        self._decode = decode
        self._answer: Answer | None = None
        self._finished = False
        self._on_failure: Callable[[LegError], None] = _ignore
        self.refused: LegError | None = None

    async def answer(self, *, wait_for_prefill: bool) -> Answer:
        """Decode's answer as soon as it begins (and, if asked, prefill has ended too). `LegError` of the leg that failed."""
        pending: set[asyncio.Task[bytes] | asyncio.Task[Answer]] = {self.prefill, self._decode}
        while True:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            ended = [task for task in (self.prefill, self._decode) if task in done]  # a set has no order
            failures = [err for task in ended if (err := task.exception()) is not None]
            if failures:
                raise min(failures, key=_says_less)
            if self._decode.done() and not (wait_for_prefill and pending):
                self._answer = self._decode.result()
                return self._answer

    def watch_prefill(self, on_failure: Callable[[LegError], None]) -> None:
        """From here on bytes go to the client; `on_failure` is told if prefill fails yet.

        If prefill now *refuses* the request (an HTTP error), decode's answer is cut, and `refused` says by what.

        A prefill connection that merely breaks is no reason, nor is a 503, which says of the worker that it ends: decode
        may have all it needs, and its own protocol with the prefill worker knows whether it has.
        """
        self._on_failure = on_failure
        self.prefill.add_done_callback(self._on_prefill_done)

    def _on_prefill_done(self, task: "asyncio.Task[bytes]") -> None:
        err = None if task.cancelled() else task.exception()
        if not isinstance(err, LegError):
            return
        self._on_failure(err)
        refuses = err.reason == "status" and err.status != GOING
        if refuses and not self._finished and self._answer is not None:
            self.refused = err
            self._answer.close()

    def finish(self) -> None:
        """The client has the whole answer: prefill may end its own in peace, for a while."""
        self._finished = True
        if not self.prefill.done():
            self.prefill.get_loop().call_later(TAIL_S, self.prefill.cancel)

    async def close(self) -> None:
        """After `finish()` nothing is left to do; before it, cancel what still runs, and wait until it has ended."""
        if self._finished:
            return
        self.prefill.cancel()
        self._decode.cancel()
        if (
            self._answer is None
            and self._decode.done()
            and not self._decode.cancelled()
            and not self._decode.exception()
        ):
            self._answer = self._decode.result()
        if self._answer is not None:
            self._answer.close()
        await asyncio.gather(self.prefill, self._decode, return_exceptions=True)


def _ignore(_: LegError) -> None:
    pass


def _says_less(err: BaseException) -> tuple[bool, bool]:
    """Of two failures at once the final one (a bad request) says more than one another worker might not have; and a worker

    that is gone more than the other one's word that it lost its peer.
    """
    return (True, True) if not isinstance(err, LegError) else (err.retryable, err.reason == "status")
