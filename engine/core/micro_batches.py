"""Pipeline parallelism: division of running requests among plans in flight.

  stage 0   | A B | C D | A B | C D |          A..D running, two stages: two micro-batches
  stage 1         | A B | C D | A B | C D |    A and B's plan follows stage 1's samples

Decodes wait for their sample, so plans have no placeholders. Chunks of a prompt follow at once.
Plans take even shares, so that no stage idles. After SGLang's pp_loop_size.
"""

from collections.abc import Iterable

from engine.core.plan import Plan, PlanItem
from engine.core.request import Request


class MicroBatches:
    """`num` plans share the running requests; 1 decodes all, ahead of samples."""

    def __init__(self, num: int) -> None:
        assert num >= 1
        self._num = num
        self._in_flight = 0  # plans with decodes

    def ready(self, running: Iterable[Request]) -> list[Request]:
        if self._num == 1:
            return [r for r in running if r.samples_left > 0]
        return [r for r in running if r.pending == 0 and r.samples_left > 0]

    def share(self, num_ready: int, *, num_running: int) -> int:
        """Number of decodes for the next plan: an even part over plans to come.

        Never more than an even part of all running ones, so uneven groups even out.
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
