"""How many pages decode leaves free when it gives some to one more request. Pure.

Four rules, over the requests that run, transfer or would come (`coming`):

    measured growth     what all will need at once, learned from ended answers (growth.py); before, the new-token ratio
    reserved tokens     each grows by the floor at least (--num-reserved-decode-tokens), as far as its own limit allows
    the largest single  the request that may still grow most is able to finish, without memory of others
    the worst case      at most what all of them take at their limits: more would lie idle
"""

from collections.abc import Callable

from engine.core.growth import MeasuredGrowth
from engine.core.new_token_ratio import NewTokenRatio
from engine.core.request import Request


class DecodeReserve:
    """`floor`: tokens for each request; `pages_for(tokens)`: as the allocator rounds."""

    def __init__(
        self, *, floor: int, ratio: NewTokenRatio, growth: MeasuredGrowth | None, pages_for: Callable[[int], int]
    ) -> None:
        self._floor = floor
        self._ratio = ratio
        self._growth = growth
        self._pages_for = pages_for

    def pages(self, coming: list[Request]) -> int:
        """Pages beyond those of the tokens that `coming` know now."""
        to_finish = [self._to_finish(request) for request in coming]
        expected = self._pages_for(int(self._expected_tokens(coming)))
        return max(min(expected, sum(to_finish)), max(to_finish))

    def _to_finish(self, request: Request) -> int:
        """Pages that `request` will take at most. Counted in its own pages: the last known one may have room."""
        return self._pages_for(request.num_tokens + _left(request)) - self._pages_for(request.num_tokens)

    def _expected_tokens(self, coming: list[Request]) -> float:
        if self._growth is not None and self._growth.known:
            return self._growth.peak_tokens(coming, floor=self._floor)
        return sum(max(self._ratio.growth_tokens(r), min(_left(r), self._floor)) for r in coming)


def _left(request: Request) -> int:
    return max(0, request.max_new_tokens - len(request.output_ids))
