"""Pipeline parallelism: how the running requests are divided among the plans in flight.

    stage 0   | A B | C D | A B | C D |            A..D running, two stages: two micro-batches
    stage 1         | A B | C D | A B | C D |      the plan of A and B follows from the samples that stage 1 returned

Plans in flight decode disjoint requests: a request waits for its sample before it is planned again, so no plan holds a
placeholder, and its token goes to all stages as a plain id. Chunks of one prompt need no sample and follow one another at once.

A plan takes its even share and leaves the rest to the next ones: a stage without a plan idles. After SGLang's pp_loop_size.
"""

from collections.abc import Iterable

from engine.core.plan import Plan, PlanItem
from engine.core.request import Request


class MicroBatches:
    """`num`: plans in flight that share the running requests; 1: each plan decodes all, ahead of their samples."""

    def __init__(self, num: int) -> None:
        assert num >= 1
        self._num = num
        self._in_flight = 0  # plans with decodes

    def ready(self, running: Iterable[Request]) -> list[Request]:
        """Return the requests that the next plan may decode."""
        if self._num == 1:
            return [r for r in running if r.samples_left > 0]
        return [r for r in running if r.pending == 0 and r.samples_left > 0]

    def share(self, num_ready: int, *, num_running: int) -> int:
        """Return how many of the ready requests the next plan decodes: what is even over the plans that may still follow.

        More than an even part of all running ones is too many, even for the last plan: so groups that have become uneven, as
        requests ended, become even again.
        """
        if self._num == 1:
            return num_ready
        left = self._num - self._in_flight
        return min(-(-num_running // self._num), -(-num_ready // left)) if left > 0 else 0

    def on_planned(self, plan: Plan) -> None:
        if self._num > 1:
            assert all(item.tokens[0] >= 0 for item in plan.items), "a placeholder between pipeline stages"
            self._in_flight += _decodes(plan.items)

    def on_collected(self, plan: Plan) -> None:
        if self._num > 1:
            self._in_flight -= _decodes(plan.items)

    def check(self, *, idle: bool) -> None:
        assert self._in_flight >= 0 and not (idle and self._in_flight), (
            f"{self._in_flight} plans with decodes in flight"
        )


def _decodes(items: Iterable[PlanItem]) -> bool:
    return any(not item.extend for item in items)
