"""The share of max_new_tokens that a running request is expected to use. Formulas and constants are SGLang's.

start    0.7 * conservativeness      decay  linear, to 0.14 of the start in 600 steps that decode
retract  (generated so far + 20 more tokens each) / (sum of max_new_tokens), over those that stay
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
        """Call it after each step in which running requests sampled."""
        self.value = max(self.value - self._step, self._floor)

    def on_retraction(self, staying: Iterable[Request]) -> None:
        requests = list(staying)
        generated = sum(len(r.output_ids) for r in requests) + RETRACT_HEADROOM_TOKENS * len(requests)
        allowed = sum(r.max_new_tokens for r in requests) + 1
        self.value = min(generated / allowed, 1.0)

    def reset(self) -> None:
        """Call it when nothing runs any more."""
        self.value = self._initial

    def growth_tokens(self, request: Request) -> float:
        """Predict the tokens that a running request will add."""
        return expected_growth(request) * self.value


def expected_growth(request: Request) -> int:
    """Return the most tokens that a request may still add, clipped: the estimate for a new one."""
    return min(request.tokens_left, CLIP_TOKENS)
