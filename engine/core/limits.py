"""Budgets of the scheduler, fixed at start."""

from dataclasses import dataclass

GROWTH_CLIP_TOKENS = 4096  # no request is expected to grow by more than this (SGLang's clip)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`prefill_tokens_per_step` is a multiple of page_size; `chunked`: prompts longer than that go in parts."""

    page_size: int
    max_running_requests: int
    max_queued_requests: int
    prefill_tokens_per_step: int
    chunked: bool

    def chunk_end(self, start: int, total: int, budget: int) -> int:
        """Where a chunk that starts at `start` ends: at `total`, or at a whole page within `budget`.

        Without chunking a prompt always goes whole (it may overdraw the budget; nothing joins it then).
        """
        if not self.chunked or total - start <= budget:
            return total
        return max(start, (start + budget) // self.page_size * self.page_size)

    def may_join(self, num_tokens: int, budget: int, *, first: bool) -> bool:
        """Whether one more prompt may enter a step that has `budget` tokens left."""
        if self.chunked:
            return budget >= self.page_size
        return first or num_tokens <= budget
