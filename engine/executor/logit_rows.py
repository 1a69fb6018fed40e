"""Rows of hidden states for logits, by call, and by request.

Ranks that share a vocabulary compute calls together.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from engine.core.plan import PlanItem

PROMPT_LOGPROB_ROWS = 256  # prompt positions with logits at once: [rows, vocab] float32


def first_rows(items: Sequence[PlanItem]) -> list[int]:
    """Each item's first row, and the end."""
    return list(accumulate((item.q_len for item in items), initial=0))


def prompt_parts(item: PlanItem, first_row: int) -> Iterator[range]:
    """Row ranges for prompt logprobs; row i predicts position i + 1."""
    assert item.logprob_from is not None
    targets = item.kv_len - item.logprob_from + (item.logprob_next is not None)
    begin = first_row + item.logprob_from - 1 - item.start
    for at in range(0, targets, PROMPT_LOGPROB_ROWS):
        yield range(begin + at, begin + min(at + PROMPT_LOGPROB_ROWS, targets))


def sampled_rows(items: Sequence[PlanItem], starts: Sequence[int]) -> list[int]:
    return [starts[i + 1] - 1 for i, item in enumerate(items) if item.sample]


def logit_calls(items: Sequence[PlanItem]) -> Iterator[list[int]]:
    """Rows of every `model.logits` call (engine/executor/sample_pass.py)."""
    starts = first_rows(items)
    for i, item in enumerate(items):
        if item.logprob_from is not None:
            yield from map(list, prompt_parts(item, starts[i]))
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
