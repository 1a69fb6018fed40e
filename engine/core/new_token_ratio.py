"""How much of its max_new_tokens a running request is expected to use: the estimate that admission uses.

It starts high, decays while nothing goes wrong, and is set from what was really generated when memory ran out:

    start    0.7 * conservativeness      decay  linear, to 0.14 of the start in 600 steps that decode
    retract  (generated so far + 20 more tokens each) / (sum of max_new_tokens), over those that stay

Formulas and constants are SGLang's; they live here and nowhere else.
"""

from collections.abc import Iterable

from engine.core.request import Request

INITIAL = 0.7
FLOOR_SHARE = 0.14
DECAY_STEPS = 600
RETRACT_HEADROOM_TOKENS = 20
CLIP_TOKENS = 4096  # no request is expected to grow by more than this


class NewTokenRatio:
    def __init__(self, *, conservativeness: float = 1.0) -> None:
        assert conservativeness >= 0
        self._initial = min(INITIAL * conservativeness, 1.0)
        self._floor = self._initial * FLOOR_SHARE
        self._step = (self._initial - self._floor) / DECAY_STEPS
        self.value = self._initial

    def decay(self) -> None:
        """Call it after each step in which running requests sampled, with or without prompts beside them."""
        self.value = max(self.value - self._step, self._floor)

    def on_retraction(self, staying: Iterable[Request]) -> None:
        requests = list(staying)
        generated = sum(len(r.output_ids) for r in requests) + RETRACT_HEADROOM_TOKENS * len(requests)
        allowed = sum(r.max_new_tokens for r in requests) + 1
        self.value = min(generated / allowed, 1.0)

    def reset(self) -> None:
        """Nothing runs any more: what was learned is about others."""
        self.value = self._initial

    def growth_tokens(self, request: Request) -> float:
        """Tokens that a running request is expected to add."""
        return expected_growth(request) * self.value


def expected_growth(request: Request) -> int:
    """The most that a request may still add, clipped: what a new one is counted with."""
    return min(max(request.max_new_tokens - len(request.output_ids), 0), CLIP_TOKENS)
