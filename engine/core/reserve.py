"""Pages that decode keeps free when admitting a request: four rules over present and new ones.

measured growth     joint need, by finished answers (growth.py), or the new-token ratio at first
reserved tokens     minimum per request (--num-reserved-decode-tokens), within limits
the largest single  the request that may add most can finish
the worst case      at most all limits together
"""

from collections.abc import Callable

from engine.core.growth import MeasuredGrowth
from engine.core.new_token_ratio import NewTokenRatio
from engine.core.request import Request


class DecodeReserve:
    def __init__(
        self, *, floor: int, ratio: NewTokenRatio, growth: MeasuredGrowth, pages_for: Callable[[int], int]
    ) -> None:
        self._floor = floor
        self._ratio = ratio
        self._growth = growth
        self._pages_for = pages_for

    def pages(self, coming: list[Request]) -> int:
        """Pages to keep free for tokens that `coming` will add."""
        pages_for = self._pages_for  # a request's last page may have room
        to_finish = [pages_for(r.num_tokens + r.tokens_left) - pages_for(r.num_tokens) for r in coming]
        expected = pages_for(int(self._expected_tokens(coming)))
        return max(min(expected, sum(to_finish)), max(to_finish))

    def _expected_tokens(self, coming: list[Request]) -> float:
        if self._growth.known:
            return self._growth.peak_tokens(coming, floor=self._floor)
        return sum(max(self._ratio.growth_tokens(r), min(r.tokens_left, self._floor)) for r in coming)
