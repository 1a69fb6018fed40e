"""Expected share of max_new_tokens that running requests use, by SGLang's formulas.

start    initial * conservativeness
decay    linear, to floor_share of the start in decay_steps that decode
retract  (generated so far + headroom_tokens each) / (sum of max_new_tokens), over the rest
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.core.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioRule:
    """Constants of the ratio; added tokens per request are capped at `clip_tokens`."""

    initial: float = 0.7
    conservativeness: float = 1.0
    floor_share: float = 0.14
    decay_steps: int = 600
    headroom_tokens: int = 20
    clip_tokens: int = 4096


class NewTokenRatio:
    def __init__(self, rule: RatioRule = RatioRule()) -> None:
        assert rule.conservativeness >= 0
        self._rule = rule
        self._initial = min(rule.initial * rule.conservativeness, 1.0)
        self._floor = self._initial * rule.floor_share
        self._step = (self._initial - self._floor) / rule.decay_steps
        self.value = self._initial

    def decay(self, share: float) -> None:
        self.value = max(self.value - self._step * share, self._floor)

    def on_retraction(self, staying: Iterable[Request]) -> None:
        requests = list(staying)
        generated = sum(len(r.output_ids) for r in requests) + self._rule.headroom_tokens * len(requests)
        allowed = sum(r.max_new_tokens for r in requests) + 1
        self.value = min(generated / allowed, 1.0)

    def reset(self) -> None:
        self.value = self._initial

    def growth_tokens(self, request: Request) -> float:
        return self.new_growth(request) * self.value

    def new_growth(self, request: Request) -> int:
        """Clipped maximum of added tokens, the estimate for a new request."""
        return min(request.tokens_left, self._rule.clip_tokens)
