"""What a turn may skip while it only decodes: to read the inbox, to ask the role. Under heavy decode it costs more than it gains.

Flags: --scheduler-recv-interval with --scheduler-recv-weight-*, --disaggregation-decode-polling-interval. The weights are as
in SGLang's SchedulerRecvSkipper, without its verify step, which no turn here has.
"""

from dataclasses import dataclass

from engine.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnWeights:
    """The weight of a turn in the interval, by the step that it launched; None: the interval ends with it.

    `default`: a step with prompts; `none`: nothing.
    """

    decode: int | None = 1
    default: int | None = None
    none: int | None = None

    def of(self, last: Plan | None) -> int | None:
        if last is None:
            return self.none
        return self.default if last.extend else self.decode


class DecodeSkipper:
    """`interval`: weight of the turns from one time to the next; of decode steps their number, unless `weights` says otherwise."""

    def __init__(self, *, interval: int, weights: TurnWeights | None = None) -> None:
        self._interval = interval
        self._weights = weights or TurnWeights()
        self._sum = 0

    def due(self, last: Plan | None) -> bool:
        """`last`: what the turn before launched, if anything. Call it once a turn."""
        weight = self._weights.of(last)
        self._sum += self._interval if weight is None else weight
        if self._sum < self._interval:
            return False
        self._sum = 0
        return True
