"""Which prompts, or parts of prompts, one prefill step computes: token budgets of a step, memory of everybody.

    input budget   max_prefill_tokens of the step (the first prompt may overdraw it)
    chunk budget   chunked_prefill_size of the step; what does not fit is cut at a whole page and goes on next step,
                   but for the end of a prompt, which may be a 16th too long
    memory         free + evictable pages, less what running requests are expected to grow by, less what this step took

A step asks for requests in the policy's order until the answer is not CONTINUE. SGLang's PrefillAdder.
"""

import math
from collections.abc import Iterable
from enum import Enum

from engine.core.limits import Limits
from engine.core.memory import Memory
from engine.core.new_token_ratio import NewTokenRatio, expected_growth
from engine.core.request import Request


class AddResult(Enum):
    """NO_TOKEN: memory is short, the batch is full. OTHER: the step's budget is used up, or this one does not fit it."""

    CONTINUE = "continue"
    NO_TOKEN = "no_token"
    OTHER = "other"


class PrefillAdder:
    """Good for one step. `decode_tokens`: draws that ride along in the step (mixed chunk)."""

    def __init__(
        self,
        *,
        limits: Limits,
        memory: Memory,
        ratio: NewTokenRatio,
        growing: Iterable[Request],
        decode_tokens: int = 0,
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._input_left = limits.max_prefill_tokens - decode_tokens
        chunk = limits.chunked_prefill_size
        self._chunk_left = math.inf if chunk is None else self._beside(decode_tokens, chunk)
        self._growth_pages = sum(self._pages(ratio.growth_tokens(r)) for r in growing)
        self.num_requests = 0

    def _beside(self, decode_tokens: int, chunk: int) -> int:
        """Half of the budget is the prompts' at least, else nobody new came in while many draw."""
        return max(chunk - decode_tokens, chunk // 2, self._limits.page_size)

    def add(self, request: Request) -> AddResult:
        """Judge `request`: CONTINUE: it is admitted (its prefix locked, its pages taken) and `take` may be called."""
        if self._no_budget(request):
            return AddResult.OTHER
        if not self._memory.admit(request, reserved_pages=self._growth_pages):
            return AddResult.NO_TOKEN
        self._growth_pages += self._pages(expected_growth(request))
        return AddResult.CONTINUE

    @property
    def exhausted(self) -> bool:
        limit = self._limits.prefill_max_requests
        return self._input_left <= 0 or self._chunk_left < self._limits.page_size or self.num_requests == limit

    def _no_budget(self, request: Request) -> bool:
        """With chunking a part will do; without it the whole prompt must fit, unless it is the first."""
        if self.exhausted:
            return True
        return not self._limits.chunked and self.num_requests > 0 and request.num_tokens > self._input_left

    def take(self, request: Request) -> int:
        """How far the prompt of an admitted or chunked request is computed in this step; uses up the budgets.

        A chunked one always goes on, by a page at least, also where draws that ride along have the budget.
        """
        start, total = request.launched_len, request.num_tokens
        left = max(self._chunk_left, self._limits.page_size)
        end = total if total - start <= left + self._limits.tail_tokens else self._whole_pages(start + int(left))
        assert end > start
        self._input_left -= end - start
        self._chunk_left -= end - start
        self.num_requests += 1
        return end

    def _whole_pages(self, tokens: int) -> int:
        return tokens // self._limits.page_size * self._limits.page_size

    def _pages(self, tokens: float) -> int:
        return math.ceil(tokens / self._limits.page_size)
