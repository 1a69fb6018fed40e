"""A request's attempt, and the hedge that may be begun beside it: the first that answers wins, the other is ended at once.

Decides by what the legs say and by one timer; whether and where a hedge goes is asked of `hedge`. No tasks: both
attempts ring one bell.
"""

import asyncio
from collections.abc import Callable

from router.client.upstream import UpstreamError
from router.requests.attempt import Attempt
from router.requests.legs import LegError


class Contest:
    """`running`: the attempts that go on; whoever leaves must `end` each of them, the winner too.

    `on_failed(attempt, failure)` is told of each that fails, `on_lost` of one that is ended because the other one answered.
    """

    def __init__(
        self,
        first: Attempt,
        *,
        on_failed: Callable[[Attempt, LegError], None],
        on_lost: Callable[[Attempt], None],
    ) -> None:
        self.running = [first]
        self.hedge: Attempt | None = None
        self._first = first
        self._bell = first.race.bell
        self._on_failed = on_failed
        self._on_lost = on_lost
        self._due = False

    async def winner(self, hedge: Callable[[], Attempt | None], *, after_s: float, wait_for_prefill: bool) -> Attempt:
        """The attempt whose answer has begun. `LegError` of the last one that fails.

        After so many seconds `hedge` is asked for another attempt, once.
        """
        timer = asyncio.get_running_loop().call_later(after_s, self._on_due)
        try:
            while (winner := self._settled(wait_for_prefill)) is None:
                if self._due:
                    self._due = False
                    self._join(hedge())
                else:
                    await self._bell.wait()
            return winner
        finally:
            timer.cancel()

    def end(self, winner: Attempt | None = None) -> None:
        """All but `winner` are over."""
        for attempt in tuple(self.running):
            if attempt is not winner:
                self.running.remove(attempt)
                if winner is not None:
                    self._on_lost(attempt)
                attempt.end(None if winner is None else UpstreamError("cancelled", "another attempt answered first"))

    def _on_due(self) -> None:
        self._due = True
        self._bell.ring()

    def _join(self, hedge: Attempt | None) -> None:
        self.hedge = hedge
        if hedge is not None:
            hedge.race.bell = self._bell
            self.running.append(hedge)

    def _settled(self, wait_for_prefill: bool) -> Attempt | None:
        for attempt in tuple(self.running):
            try:
                if attempt.race.settled(wait_for_prefill=wait_for_prefill):
                    return attempt
            except LegError as failure:
                self._on_failed(attempt, failure)
                if len(self.running) == 1 or (attempt is self._first and not failure.retryable):
                    raise
                self.running.remove(attempt)  # the other one may do better: a hedge that is refused says nothing of it
                attempt.end()
        return None
