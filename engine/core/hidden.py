"""Which hidden states a step gives for a request, and their way to its outputs. Pure: bytes of float32 rows.

Every position's state is taken once, in order: positions computed again after a retraction are not sent again.
"""

import array
import math

from engine.core.plan import PlanItem
from engine.core.request import Request


def unseen_from(request: Request) -> int:
    """First position that may not come from the cache, because its hidden state is wanted; `num_tokens`: none."""
    if request.return_hidden_states or request.pooling == "mean":
        return request.hidden_launched
    return request.num_tokens


def note_launch(request: Request, start: int, end: int) -> int | None:
    """`PlanItem.hidden_from` of the item for [start, end)."""
    if not request.return_hidden_states and not request.pooling:
        return None
    first, request.hidden_launched = max(start, request.hidden_launched), max(end, request.hidden_launched)
    if request.pooling == "last" and end < request.num_tokens:
        return None
    return first if first < end else None


def take(request: Request, item: PlanItem, rows: bytes) -> None:
    """Take a collected step's rows: the prompt's are joined, a later token's stands alone, an embedding's are summed."""
    assert item.hidden_from is not None
    if request.pooling:
        request.unsent.hidden = [_pooled(request, rows)] if item.sample else [_sum(request.unsent.hidden, rows)]
        return
    row_bytes = len(rows) // (item.kv_len - item.hidden_from)
    split = max(0, len(request.input_ids) - item.hidden_from) * row_bytes
    request.unsent.input_hidden += rows[:split]
    request.unsent.hidden += [rows[at : at + row_bytes] for at in range(split, len(rows), row_bytes)]


def _pooled(request: Request, rows: bytes) -> bytes:
    """Unit length, as SGLang's pooler and OpenAI's embeddings have it (a mean's divisor does not change that)."""
    vector = array.array("f", _sum(request.unsent.hidden, rows))
    norm = math.sqrt(math.fsum(x * x for x in vector)) or 1.0
    return array.array("f", [x / norm for x in vector]).tobytes()


def _sum(before: list[bytes], rows: bytes) -> bytes:
    if not before:
        return rows
    return array.array("f", map(float.__add__, array.array("f", before[0]), array.array("f", rows))).tobytes()
