"""Budgets and switches of the scheduler, fixed at start."""

from dataclasses import dataclass

from engine.core.policy import NO_PRIORITIES, Priorities

TAIL_SHARE = 16
ALL_IDS = 1 << 32  # of a vocabulary that has every id


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a step and of the requests that run or wait, and what the flags and the role choose.

    `chunked_prefill_size`: prompt tokens of a step, a multiple of page_size; longer prompts go in parts, and their ends may
    exceed it by `tail_tokens`. None: prompts go whole, and `max_prefill_tokens` bounds what may join the first.
    `prefill_max_requests`: prompts of a step. `mixed_chunk`: running decodes ride along in a prefill step. `multiplexed`: prompts and
    decodes are steps of two lanes (engine/core/lanes.py).
    `wait_between_prefills`: the second of two prefill steps in a row has depth 1, so that first tokens leave before it.
    `max_loras_per_batch`: adapters in one step. `lora_drain_wait_s`: wait after which a request's adapter goes first.
    `resume_elsewhere`: the role decides where the KV of retracted requests comes from (`HeldRequests.take_retracted`).
    `sibling_tokens`: a cache-aware policy puts a prompt that shares this many uncached tokens with an earlier one behind it;
    `min_shared_tokens`: a prompt waits a step for another one that computes this many of its tokens.
    `reserve_floor`: tokens that decode expects each request to grow by, at least. `vocab_size`: only ids below it are
    tokens. `test_retract`: decode steps between two forced retractions; 0: none is forced.
    `grid`: of a model with recurrent states, lengths at which prompts may be cut; None: at each page.
    `pp_size`: pipeline stages, each with its own plan; `pp_async_batch_depth`: plans more than stages.
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
    min_shared_tokens: int = 128  # about the cost of a step that reads the weights for a few tokens
    reserve_floor: int = 0
    resume_elsewhere: bool = False
    vocab_size: int = ALL_IDS
    test_retract: int = 0
    grid: int | None = None
    pp_size: int = 1
    pp_async_batch_depth: int = 0

    @property
    def micro_batches(self) -> int:
        """Plans in flight that share the running requests; 1: a plan decodes all of them."""
        return 1 if self.pp_size == 1 else self.pp_size + self.pp_async_batch_depth

    @property
    def part_tokens(self) -> int:
        """Tokens of the smallest part of a prompt but its last."""
        return self.grid or self.page_size

    @property
    def tail_tokens(self) -> int:
        """Tokens by which the end of a prompt may exceed the chunk budget: a step of its own costs more."""
        return (self.chunked_prefill_size or 0) // TAIL_SHARE
