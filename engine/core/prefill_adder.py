"""Which prompts, or parts of prompts, one prefill step computes: the token budgets of a step, and the memory left.

    input budget   max_prefill_tokens of the step (the first prompt may overdraw it)
    chunk budget   chunked_prefill_size of the step; what does not fit is cut at a whole page and goes on next step,
                   but for the end of a prompt, which may be a 16th too long
    work budget    what a step may hold to end within --max-step-time (engine/core/step_budget.py), cut in the same way
    memory         free + evictable pages, less what running requests are expected to grow by, less what this step took

The planner adds requests in the policy's order until the answer is not CONTINUE. SGLang's PrefillAdder.
"""

import math
from collections.abc import Iterable, Sequence
from enum import Enum

from engine.core.limits import TAIL_SHARE, Limits
from engine.core.memory import Memory, growth_pages
from engine.core.new_token_ratio import NewTokenRatio, expected_growth
from engine.core.request import Request
from engine.core.step_budget import StepBudget


class AddResult(Enum):
    """NO_TOKEN: memory is short, the batch is full. OTHER: the step's budget is used up, or this one does not fit it."""

    CONTINUE = "continue"
    NO_TOKEN = "no_token"
    OTHER = "other"


class PrefillAdder:
    """For one step. `decode_tokens`: decodes that ride along in the step (mixed chunk)."""

    def __init__(
        self,
        *,
        limits: Limits,
        memory: Memory,
        ratio: NewTokenRatio,
        growing: Iterable[Request],
        decode_tokens: int = 0,
        budget: StepBudget | None = None,
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._input_left = limits.max_prefill_tokens - decode_tokens
        chunk = limits.chunked_prefill_size
        self._chunk_left = math.inf if chunk is None else self._beside(decode_tokens, chunk)
        self._budget = budget
        self._work_left = math.inf if budget is None else self._beside(decode_tokens, budget.work)
        self._growth_pages = {r.rid: self._pages(ratio.growth_tokens(r)) for r in growing}
        self._reserved_pages = sum(self._growth_pages.values())
        self.num_requests = 0

    def _beside(self, decode_tokens: int, budget: float) -> float:
        """Reserve at least half of the budget for prompts, so that decodes cannot starve them."""
        return max(budget - decode_tokens, budget // 2, self._limits.page_size)

    def add(self, request: Request) -> AddResult:
        """Admit `request` if it fits. CONTINUE: its prefix is locked, its pages are taken, and `take` may be called."""
        if self._no_budget(request):
            return AddResult.OTHER
        if not self._memory.admit(request, reserved_pages=self._reserved_pages):
            return AddResult.NO_TOKEN
        self._reserved_pages += self._pages(expected_growth(request))
        return AddResult.CONTINUE

    def reserve_for(self, request: Request, *, without: Sequence[Request]) -> int:
        """Pages that `add` needs free beside those of the known tokens of `request`, once `without` have left."""
        left = sum(self._growth_pages.get(r.rid, 0) for r in without)
        return growth_pages(self._memory.allocator, request, expected_growth(request)) + self._reserved_pages - left

    def forget(self, gone: Sequence[Request]) -> None:
        """Drop the expected growth of `gone`."""
        self._reserved_pages -= sum(self._growth_pages.pop(r.rid, 0) for r in gone)

    @property
    def exhausted(self) -> bool:
        limit = self._limits.prefill_max_requests
        left = min(self._chunk_left, self._work_left)
        return self._input_left <= 0 or left < self._limits.page_size or self.num_requests == limit

    def _no_budget(self, request: Request) -> bool:
        """With chunking a part will do; without it the whole prompt must fit, unless it is the first."""
        if self.exhausted:
            return True
        return not self._limits.chunked and self.num_requests > 0 and request.num_tokens > self._input_left

    def take(self, request: Request) -> int:
        """Return how far the prompt of an admitted or chunked request is computed in this step; uses up the budgets.

        A chunked one always goes on, by a page at least, also where decodes that ride along have the budget.
        """
        start, total = request.launched_len, request.num_tokens
        left, tail = self._room(start)
        end = total if total - start <= left + tail else self._whole_pages(start + int(left))
        assert end > start
        if self._budget is not None:
            self._work_left -= self._budget.work_of(start, end - start)
        self._input_left -= end - start
        self._chunk_left -= end - start
        self.num_requests += 1
        return end

    def _room(self, start: int) -> tuple[float, int]:
        """(tokens that a prompt may go on by from `start`, a page at least; tokens that its end may have beyond them)."""
        page_size, tail = self._limits.page_size, self._limits.tail_tokens
        left = max(self._chunk_left, page_size)
        if self._budget is None:
            return left, tail
        in_time = max(self._budget.tokens(self._work_left, start), page_size)
        return (left, tail) if left <= in_time else (in_time, min(tail, in_time // TAIL_SHARE))

    def _whole_pages(self, tokens: int) -> int:
        return tokens // self._limits.page_size * self._limits.page_size

    def _pages(self, tokens: float) -> int:
        return math.ceil(tokens / self._limits.page_size)
