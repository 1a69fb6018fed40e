"""Rows of a forward pass: tokens that the host does not know yet, hidden states for logits."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from engine.core.plan import PlanItem

# ---- future map


class StepInputs(Protocol):
    """Inputs of steps: tokens, or a later stage's hidden states.

    Recorded steps reuse memory: `fill` writes it before each replay, `recorded` reads it inside.
    """

    def resolve(self, token_ids: Tensor) -> Tensor:
        """Return input for `DenseDecoder.begin` from ids or placeholders [T]."""

    def fill(self, rows: int) -> None:
        """Prepare a replay with `rows` valid rows."""

    def recorded(self, token_ids: Tensor) -> Tensor:
        """`resolve` inside a recorded step, with padding."""


class FutureMap:
    """Future map in `last` int64[slots + 1]; padding stores in the extra cell.

    Last token of each slot on the device, unknown to the host. Inputs may contain placeholders
    -(slot + 1), resolved before the forward; sampled tokens are stored. FIFO order is the only
    synchronization. After SGLang's FutureMap.
    """

    def __init__(self, last: Tensor) -> None:
        self._last = last

    @classmethod
    def on(cls, device: torch.device, *, num_slots: int) -> "FutureMap":
        return cls(torch.zeros(num_slots + 1, dtype=torch.int64, device=device))

    def resolve(self, token_ids: Tensor) -> Tensor:
        return torch.where(token_ids < 0, self._last[(-token_ids - 1).clamp_min(0)], token_ids)

    def fill(self, rows: int) -> None:
        """Do nothing: recorded ids are inputs."""

    def recorded(self, token_ids: Tensor) -> Tensor:
        return self.resolve(token_ids)

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        """Store sampled tokens; both int64[n]."""
        self._last[slots] = tokens

    def on_sampled(self) -> None:
        """Share stored tokens, in maps over ranks."""


# ---- rows for logits

PROMPT_LOGPROB_ROWS = 256  # prompt positions with logits at once: [rows, vocab] float32


def first_rows(items: Sequence[PlanItem]) -> list[int]:
    """Each item's first row, and the end.

    Rows of hidden states for logits, by call, and by request. Ranks that share a vocabulary compute
    calls together.
    """
    return list(accumulate((item.q_len for item in items), initial=0))


def prompt_parts(item: PlanItem, first_row: int) -> Iterator[tuple[range, list[int]]]:
    """Row ranges for prompt logprobs, and their tokens; row i predicts position i + 1."""
    assert item.logprob_from is not None
    targets = item.tokens[item.logprob_from - item.start :]
    targets += [] if item.logprob_next is None else [item.logprob_next]
    begin = first_row + item.logprob_from - 1 - item.start
    for at in range(0, len(targets), PROMPT_LOGPROB_ROWS):
        part = targets[at : at + PROMPT_LOGPROB_ROWS]
        yield range(begin + at, begin + at + len(part)), part


def sampled_rows(items: Sequence[PlanItem], starts: Sequence[int]) -> list[int]:
    return [starts[i + 1] - 1 for i, item in enumerate(items) if item.sample]


def logit_calls(items: Sequence[PlanItem]) -> Iterator[list[int]]:
    """Rows of every `model.logits` call (engine/executor/sample_pass.py)."""
    starts = first_rows(items)
    for i, item in enumerate(items):
        if item.logprob_from is not None:
            yield from ([*rows] for rows, _ in prompt_parts(item, starts[i]))
    if rows := sampled_rows(items, starts):
        yield rows


def runs_of(items: Sequence[PlanItem]) -> list[list[int]]:
    """Items by request: the known tokens' first, then draft readers."""
    runs: list[list[int]] = []
    for i, item in enumerate(items):
        if item.draft:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs
