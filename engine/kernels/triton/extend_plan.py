"""Split of prompt attention into programs. Pure; the host knows all lengths.

A request is split by its own lengths only, so its result is the same in any batch:

  whole    many new tokens: a program per tile of rows and query head
  split    few, long context: rows are (token, head) pairs, so a tile reads K and V once for
           a KV head's query heads; a program per span of the context, then a merge
  library  like whole, by a library's kernel, for contexts that no recorded step has

    rows of a split tile, 3 heads a group: | token 0: head 0, 1, 2 | token 1: head 0, 1, 2 | ...
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

PROGRAMS = 264  # two per multiprocessor of an H100 or H200: fewer leave some idle
MIN_SPAN = 512  # tokens: shorter spans save less than the merge costs
MAX_WHOLE = 2048  # tokens of a never split context: recorded steps have these, and must give the same bits
MAX_SPANS = 64  # limit of the merge's registers
MAX_PARTS = 1 << 17  # part rows times KV heads of a round: 64 MiB at head_dim 128


@dataclass(slots=True)
class SplitRound:
    """Split requests computed together, then merged, before the next round reuses the memory.

    - split: (request, tile, begin, end, part row) per program
    - merges: (request, tile, part row, spans) per tile, over adjacent spans
    """

    split: list[int] = field(default_factory=list)
    merges: list[int] = field(default_factory=list)
    part_rows: int = 0
    most_rows: int = 0


@dataclass(slots=True)
class ExtendPlan:
    """Flat int32 lists for the kernels.

    `whole`: (request, tile) per program, largest first; `library`: requests.
    """

    whole: list[int] = field(default_factory=list)
    rounds: list[SplitRound] = field(default_factory=list)
    library: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendShape:
    """Heads of a layer, and tiles of `rows` that read `block` tokens at a time.

    `group`: query heads per KV head. `pairs`: rows of whole requests are (token, head) pairs, too.
    """

    group: int
    kv_heads: int
    rows: int
    block: int
    window: int = 0
    pairs: bool = False


def plan_extend(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    shape: ExtendShape,
    *,
    has_library: bool = False,
    skip: Collection[int] = (),
) -> ExtendPlan:
    """Plan programs of all requests but `skip`."""
    plan, group, kv_heads, block = ExtendPlan(), shape.group, shape.kv_heads, shape.block
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if request in skip:
            continue
        tiles = -(-q_len * group // shape.rows)
        hidden = first_seen(kv_len - q_len, shape.window) // block * block
        context = kv_len - hidden
        span = span_tokens(context, programs=tiles * kv_heads, block=block)
        if span < context:
            parts = q_len * group * -(-context // span) * kv_heads  # upper bound
            if not plan.rounds or plan.rounds[-1].part_rows * kv_heads + parts > MAX_PARTS:
                plan.rounds.append(SplitRound())
            _split(plan.rounds[-1], request, q_len, kv_len, range(hidden, kv_len, span), shape)
        elif has_library and kv_len > MAX_WHOLE:
            plan.library.append(request)
        else:
            for tile in reversed(range(tiles if shape.pairs else -(-q_len // shape.rows))):
                plan.whole += (request, tile)
    return plan


def first_seen(position: int, window: int) -> int:
    return max(0, position + 1 - window) if window else 0


def span_tokens(context: int, *, programs: int, block: int) -> int:
    """Tokens per span, a multiple of `block`; `context` or more is no split."""
    if context <= MAX_WHOLE:
        return context
    spans = min(PROGRAMS // programs, MAX_SPANS, context // MIN_SPAN)
    return -(-context // (block * max(spans, 1))) * block


def _split(into: SplitRound, request: int, q_len: int, kv_len: int, begins: range, shape: ExtendShape) -> None:
    group, rows = shape.group, shape.rows
    part_row, parts, span, before = into.part_rows, [], begins.step, kv_len - q_len
    for tile in range(-(-q_len * group // rows)):
        height = min(rows, q_len * group - tile * rows)
        first = first_seen(before + tile * rows // group, shape.window)  # of the tile's first row
        seen = before + (tile * rows + height - 1) // group + 1  # of its last row
        mine = [begin for begin in begins if first < begin + span and begin < seen]
        into.merges += (request, tile, part_row, len(mine))
        for begin in mine:
            parts.append((begin, tile, min(begin + span, seen), part_row))
            part_row += height
        into.most_rows = max(into.most_rows, height)
    for begin, tile, end, at in sorted(parts):  # tiles of one span together: they read the same K and V
        into.split += (request, tile, begin, end, at)
    into.part_rows = part_row
