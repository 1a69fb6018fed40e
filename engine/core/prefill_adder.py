"""Token budgets of a prefill step, and remaining memory. After SGLang's PrefillAdder.

input budget   max_prefill_tokens per step (the first prompt may exceed it)
chunk budget   chunked_prefill_size per step; longer prompts are cut at pages (`Limits.grid`),
               but last chunks may be a 16th longer
work budget    tokens within --max-step-time (engine/core/estimates.py), cut likewise
               encoded images cost their tokens in all budgets
memory         free + evictable pages, less expected pages of running requests and this step's
"""

import math
from collections.abc import Iterable, Sequence
from enum import Enum

from engine.core.estimates import StepBudget
from engine.core.memory import growth_pages
from engine.core.policy import TAIL_SHARE
from engine.core.request import Request
from engine.core.state import SchedulerState


class AddResult(Enum):
    """NO_TOKEN: no memory or batch full. OTHER: over the step's budget."""

    CONTINUE = "continue"
    NO_TOKEN = "no_token"
    OTHER = "other"


class PrefillAdder:
    """Fills one step with `decode_tokens` of mixed decodes."""

    def __init__(
        self,
        state: SchedulerState,
        *,
        growing: Iterable[Request],
        decode_tokens: int = 0,
        budget: StepBudget | None = None,
    ) -> None:
        self._limits = limits = state.limits
        self._memory = state.memory
        self._step_ends = state.step_ends
        self._features = state.features
        self._ratio = ratio = state.ratio
        self._input_left = limits.max_prefill_tokens - decode_tokens
        chunk = limits.chunked_prefill_size
        self._chunk_left = math.inf if chunk is None else self._beside(decode_tokens, chunk)
        self._budget = budget
        self._work_left = math.inf if budget is None else self._beside(decode_tokens, budget.work)
        self._growth_pages = {r.rid: self._pages(ratio.growth_tokens(r)) for r in growing}
        self._reserved_pages = sum(self._growth_pages.values())
        self.num_requests = 0

    def _beside(self, decode_tokens: int, budget: float) -> float:
        """Reserve half of the budget for prompts, so that decodes cannot starve them."""
        return max(budget - decode_tokens, budget // 2, self._limits.part_tokens)

    def add(self, request: Request) -> AddResult:
        """Admit `request` if it fits. CONTINUE: pages are allocated, call `take`."""
        if self._no_budget(request):
            return AddResult.OTHER
        if request.images and request.saved_len == 0 and self._images_wait(request):
            return AddResult.OTHER
        reserved, lands = self.reserve_for(request, without=()), request.saved_len > 0
        if not self._memory.admit(request, reserved_pages=reserved, lands=lands):
            return AddResult.NO_TOKEN
        self._reserved_pages += self._pages(self._ratio.new_growth(request))
        return AddResult.CONTINUE

    def _images_wait(self, request: Request) -> bool:
        return not self._features.has_room(request, self._limits.part_tokens)

    def reserve_for(self, request: Request, *, without: Sequence[Request]) -> int:
        """Pages for `add`, besides known tokens, without `without`."""
        left = sum(self._growth_pages.get(r.rid, 0) for r in without)
        growth = self._ratio.new_growth(request)
        return growth_pages(self._memory.allocator, request, growth) + self._reserved_pages - left

    def forget(self, gone: Sequence[Request]) -> None:
        self._reserved_pages -= sum(self._growth_pages.pop(r.rid, 0) for r in gone)

    @property
    def exhausted(self) -> bool:
        limit = self._limits.prefill_max_requests
        left = min(self._chunk_left, self._work_left)
        return self._input_left <= 0 or left < self._limits.part_tokens or self.num_requests == limit

    def _no_budget(self, request: Request) -> bool:
        """Without chunking the whole prompt must fit, unless it is first."""
        if self.exhausted:
            return True
        whole = self._limits.chunked_prefill_size is None
        return whole and self.num_requests > 0 and request.num_tokens > self._input_left

    def take(self, request: Request) -> int:
        """Use budgets; return the prompt's new end, at least a page further."""
        start, total = request.launched_len, request.num_tokens
        left, tail = self._room(start)
        most = total
        if request.images:
            most, left = self._before_images(request, start, left)
        end = total if total - start <= left + tail else self._whole(start + int(left))
        if end > most:
            end = self._whole(most)
        end = self._step_ends.cut(request, start, end)
        assert end > start
        if request.images:
            tokens = self._features.use(request, start, end)
            self._input_left -= tokens
            self._chunk_left -= tokens
            self._work_left -= tokens
        if self._budget is not None:
            self._work_left -= self._budget.work_of(start, end - start)
        self._input_left -= end - start
        self._chunk_left -= end - start
        self.num_requests += 1
        return end

    def _before_images(self, request: Request, start: int, left: float) -> tuple[int, float]:
        """Return the end by images, and the rest of `left` after encoding: at least a chunk."""
        part = self._limits.part_tokens
        budget = min(left, max(self._input_left, part))
        most, rest = self._features.reach(request, start, part=part, budget=budget)
        return most, max(left - (budget - rest), part)

    def _room(self, start: int) -> tuple[float, int]:
        """Return (tokens from `start`, at least a chunk; allowed excess of a last chunk)."""
        part, tail = self._limits.part_tokens, self._limits.tail_tokens
        left = max(self._chunk_left, part)
        if self._budget is None:
            return left, tail
        in_time = max(self._budget.tokens(self._work_left, start), part)
        return (left, tail) if left <= in_time else (in_time, min(tail, in_time // TAIL_SHARE))

    def _whole(self, tokens: int) -> int:
        return tokens // self._limits.part_tokens * self._limits.part_tokens

    def _pages(self, tokens: float) -> int:
        return math.ceil(tokens / self._limits.page_size)
