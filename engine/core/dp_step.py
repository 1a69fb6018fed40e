"""DP attention: rows by which ranks agree on a step (engine/core/dp_agreement.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

DECIDES = 0  # rank that sets the gate for prompts


class Padding(Enum):
    """Token exchange: MAX_LEN pads to the maximum (all-gather), SUM_LEN concatenates (all-reduce)."""

    MAX_LEN = "max_len"
    SUM_LEN = "sum_len"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A rank's part of a step; an `idle` one joins for others.

    `extend`: with prompts; `can_graph`: may replay a graph; `prefillable`: prompts wait.
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
    """Step of all ranks: padded `tokens` per rank; all replay a `graph` or none does."""

    step: int
    tokens: tuple[int, ...]
    padding: Padding
    extend: bool
    graph: bool


def agree(rows: Sequence[Row]) -> AgreedStep:
    """Return the step of all ranks' rows, without SGLang's rounding for a reduce-scatter."""
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
    """Choose fewer bytes, as SGLang's DpPaddingMode."""
    if not extend and 2 * sum(tokens) > max(tokens) * len(tokens):
        return Padding.MAX_LEN
    return Padding.SUM_LEN
