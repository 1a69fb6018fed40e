"""Which rows of a step's hidden states become logits, call by call, and which belong to one request.

Ranks that share a vocabulary compute each call together.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from engine.core.plan import PlanItem

PROMPT_LOGPROB_ROWS = 256  # prompt positions whose logits exist at once: [rows, vocab] float32


def first_rows(items: Sequence[PlanItem]) -> list[int]:
    """The row where each item begins, and the end."""
    return list(accumulate((item.q_len for item in items), initial=0))


def prompt_parts(item: PlanItem, first_row: int) -> Iterator[range]:
    """Rows of the prompt positions whose logprobs are wanted, in parts; row i predicts position i + 1."""
    assert item.logprob_from is not None
    targets = item.kv_len - item.logprob_from + (item.logprob_next is not None)
    begin = first_row + item.logprob_from - 1 - item.start
    for at in range(0, targets, PROMPT_LOGPROB_ROWS):
        yield range(begin + at, begin + min(at + PROMPT_LOGPROB_ROWS, targets))


def sampled_rows(items: Sequence[PlanItem], starts: Sequence[int]) -> list[int]:
    """The last row of each item that samples."""
    return [starts[i + 1] - 1 for i, item in enumerate(items) if item.sample]


def logit_calls(items: Sequence[PlanItem]) -> Iterator[list[int]]:
    """The rows of every call of `model.logits` in a step, in their order (engine/executor/sample_pass.py)."""
    starts = first_rows(items)
    for i, item in enumerate(items):
        if item.logprob_from is not None:
            yield from map(list, prompt_parts(item, starts[i]))
    if rows := sampled_rows(items, starts):
        yield rows


def runs_of(items: Sequence[PlanItem]) -> list[list[int]]:
    """The items of each request, in order: the one with known tokens, behind it those that read drafts, each a token further."""
    runs: list[list[int]] = []
    for i, item in enumerate(items):
        if item.draft:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs
