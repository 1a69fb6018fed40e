"""Hidden states returned by steps: float32 rows, once per position and in order."""

import array
import math

from engine.core.plan import PlanItem
from engine.core.request import Request


def unseen_from(request: Request) -> int:
    """First position that must be computed for its hidden state, or `num_tokens`."""
    if request.return_hidden_states or request.pooling == "mean":
        return request.hidden_launched
    return request.num_tokens


def note_launch(request: Request, start: int, end: int) -> int | None:
    if not request.return_hidden_states and not request.pooling:
        return None
    first, request.hidden_launched = max(start, request.hidden_launched), max(end, request.hidden_launched)
    if request.pooling in ("last", "labels") and end < request.num_tokens:
        return None
    return first if first < end else None


def take(request: Request, item: PlanItem, rows: bytes) -> None:
    assert item.hidden_from is not None
    if request.pooling:
        request.unsent.hidden = [_pooled(request, rows)] if item.sample else [_sum(request.unsent.hidden, rows)]
        return
    row_bytes = len(rows) // (item.kv_len - item.hidden_from)
    split = max(0, len(request.input_ids) - item.hidden_from) * row_bytes
    request.unsent.input_hidden += rows[:split]
    request.unsent.hidden += [rows[at : at + row_bytes] for at in range(split, len(rows), row_bytes)]


def _pooled(request: Request, rows: bytes) -> bytes:
    """Unit length by default, as in SGLang and OpenAI; label logits stay."""
    if request.pooling == "labels":
        return rows
    vector = array.array("f", _sum(request.unsent.hidden, rows))
    if request.unit:
        divisor = math.sqrt(math.fsum(x * x for x in vector)) or 1.0
    else:
        divisor = len(request.input_ids) if request.pooling == "mean" else 1
    return array.array("f", [x / divisor for x in vector]).tobytes()


def _sum(before: list[bytes], rows: bytes) -> bytes:
    if not before:
        return rows
    return array.array("f", map(float.__add__, array.array("f", before[0]), array.array("f", rows))).tobytes()
