"""Budgets and switches of the scheduler, fixed at start."""

from dataclasses import dataclass

from engine.core.policy import NO_PRIORITIES, Priorities

TAIL_SHARE = 16
ALL_IDS = 1 << 32  # of a vocabulary that has every id


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits from flags and role.

    - chunked_prefill_size: prompt tokens per step, a multiple of page_size, exceeded by last chunks
      up to `tail_tokens`; None: whole prompts, bounded by `max_prefill_tokens`
    - mixed_chunk: decodes ride in prefill steps; multiplexed: two streams (engine/core/lanes.py)
    - wait_between_prefills: depth 1 between prefill steps, so that first tokens leave earlier
    - resume_elsewhere: the role chooses retracted requests' KV source
    - sibling_tokens: uncached prefix shared with an earlier prompt that defers one (cache-aware)
    - min_shared_tokens: shared computation for which a prompt waits a step
    - reserve_floor: minimum of added tokens expected per decode; vocab_size: valid ids
    - test_retract: decode steps between forced retractions, 0 is off
    - grid: chunk lengths for recurrent models, by default pages
    - pp_async_batch_depth: plans more than stages
    """

    page_size: int
    max_running_requests: int
    max_queued_requests: int
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int | None = None
    prefill_max_requests: int | None = None
    mixed_chunk: bool = False
    multiplexed: bool = False
    wait_between_prefills: bool = False
    max_loras_per_batch: int = 0
    lora_drain_wait_s: float | None = None
    policy: str = "fcfs"
    priorities: Priorities = NO_PRIORITIES
    sibling_tokens: int = 32
    min_shared_tokens: int = 128  # about the cost of reading the weights for a few tokens
    reserve_floor: int = 0
    resume_elsewhere: bool = False
    vocab_size: int = ALL_IDS
    test_retract: int = 0
    grid: int | None = None
    pp_size: int = 1
    pp_async_batch_depth: int = 0

    @property
    def micro_batches(self) -> int:
        """Plans that share running requests; 1: each plan decodes all."""
        return 1 if self.pp_size == 1 else self.pp_size + self.pp_async_batch_depth

    @property
    def part_tokens(self) -> int:
        return self.grid or self.page_size

    @property
    def tail_tokens(self) -> int:
        """Tokens by which a last chunk may exceed the budget, cheaper than its own step."""
        return (self.chunked_prefill_size or 0) // TAIL_SHARE
