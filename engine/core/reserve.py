"""How many pages decode leaves free when it gives some to one more request: four rules over those that run or come.

measured growth     what all will need at once, by ended answers (growth.py), or at first by the new-token ratio
reserved tokens     each grows by the floor at least (--num-reserved-decode-tokens), within its own limit
the largest single  the request that may still grow most can finish
the worst case      at most what all of them take at their limits
"""

from collections.abc import Callable

from engine.core.growth import MeasuredGrowth
from engine.core.new_token_ratio import NewTokenRatio
from engine.core.request import Request


class DecodeReserve:
    """`floor`: tokens for each request; `pages_for(tokens)`: as the allocator rounds."""

    def __init__(
        self, *, floor: int, ratio: NewTokenRatio, growth: MeasuredGrowth, pages_for: Callable[[int], int]
    ) -> None:
        self._floor = floor
        self._ratio = ratio
        self._growth = growth
        self._pages_for = pages_for

    def pages(self, coming: list[Request]) -> int:
        """Return the pages to keep free beyond the known tokens of `coming`."""
        pages_for = self._pages_for  # the last page of a request may have room
        to_finish = [pages_for(r.num_tokens + r.tokens_left) - pages_for(r.num_tokens) for r in coming]
        expected = pages_for(int(self._expected_tokens(coming)))
        return max(min(expected, sum(to_finish)), max(to_finish))

    def _expected_tokens(self, coming: list[Request]) -> float:
        if self._growth.known:
            return self._growth.peak_tokens(coming, floor=self._floor)
        return sum(max(self._ratio.growth_tokens(r), min(r.tokens_left, self._floor)) for r in coming)
