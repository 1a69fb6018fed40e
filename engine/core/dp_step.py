"""DP attention: what the ranks tell each other of a step, and what follows from it. Ranks attend apart and share the other layers.

Each rank posts one row for a step (engine/core/dp_agreement.py). From the rows of all ranks every rank derives the same step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

DECIDES = 0  # the rank that opens and closes the gate for prompts


class Padding(Enum):
    """The exchange of all ranks' tokens. MAX_LEN: each rank's padded to the most (all-gather); SUM_LEN: end to end (all-reduce)."""

    MAX_LEN = "max_len"
    SUM_LEN = "sum_len"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A rank's part of step `step`.

    `idle`: nothing; it takes part because others ask for the step. `tokens`: of its items. `extend`: parts of prompts are among them. `can_graph`: it could replay a graph. `prefillable`: prompts wait that it could
    compute; `token_usage`: share of its KV memory in use; `running`, `waiting`: its requests.
    """

    step: int
    idle: bool
    tokens: int = 0
    extend: bool = False
    can_graph: bool = True
    prefillable: bool = False
    token_usage: float = 0.0
    running: int = 0
    waiting: int = 0


class AgreedStep(msgspec.Struct, frozen=True, array_like=True):
    """A step as all ranks compute it. `tokens`: of each rank, with padding. `graph`: all replay one. Followers receive it, too."""

    step: int
    tokens: tuple[int, ...]
    padding: Padding
    extend: bool
    graph: bool


def agree(rows: Sequence[Row]) -> AgreedStep:
    """Return the step that the rows of all ranks, in order of rank, make.

    SGLang rounds tokens up to the ranks that share them, for its reduce-scatter; here each of these ranks has all of them.
    """
    step = rows[0].step
    assert all(row.step == step for row in rows) and not all(row.idle for row in rows)
    extend = any(row.extend for row in rows)
    tokens = [row.tokens for row in rows]
    padding = padding_of(tokens, extend=extend)
    if padding is Padding.MAX_LEN:
        tokens = [max(tokens)] * len(rows)
    return AgreedStep(
        step=step,
        tokens=tuple(tokens),
        padding=padding,
        extend=extend,
        graph=not extend and all(row.can_graph for row in rows),
    )


def padding_of(tokens: Sequence[int], *, extend: bool) -> Padding:
    """Choose what moves fewer bytes, as SGLang's DpPaddingMode: an all-reduce moves twice what an all-gather does."""
    if not extend and 2 * sum(tokens) > max(tokens) * len(tokens):
        return Padding.MAX_LEN
    return Padding.SUM_LEN
