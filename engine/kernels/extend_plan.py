"""How the attention of prompts is cut into programs: pure arithmetic on the host, which knows the lengths of prompts.

A request is cut by its own lengths alone, so that its result is the same in any batch:

    many new tokens    whole: a program for each tile of rows and each query head walks all tokens that its rows see
    few, long context  split: a row is a (token, head) pair, so that a tile holds all query heads of a kv head and reads its
                       K and V once; the context is cut into spans, a program for each, whose parts are merged
    library            as whole, by a library's kernel where there is one: contexts that no recorded step takes

With a window the context is what the first new token sees, and what follows: a tile has no span that none of its rows sees.

    rows of a split tile, 3 heads a group: | token 0: head 0, 1, 2 | token 1: head 0, 1, 2 | ...
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

PROGRAMS = 264  # two for each multiprocessor of an H100 or H200: fewer leave some idle
MIN_SPAN = 512  # tokens: shorter spans save less than the merge costs
MOST_WHOLE = 2048  # tokens of a context that is never split: recorded steps take these, and must give the same bits
MOST_SPANS = 64  # what the merge holds in registers
MOST_PARTS = 1 << 17  # part rows times kv heads of a round: 64 MiB at a head_dim of 128, and some requests of any kind


@dataclass(slots=True)
class SplitRound:
    """Split requests that are computed together, then merged, before the next round takes the memory of their parts.

    split:     (request, tile, begin, end, part row) of each program: the tokens of its span that the tile sees, and where
               its rows go in [part_rows, kv_heads, head_dim]
    merges:    (request, tile, part row, spans) of each tile; its spans follow one another
    most_rows: rows of the largest tile
    """

    split: list[int] = field(default_factory=list)
    merges: list[int] = field(default_factory=list)
    part_rows: int = 0
    most_rows: int = 0


@dataclass(slots=True)
class ExtendPlan:
    """Flat lists of int32 for the kernels.

    whole:   (request, tile) of each program; the last tiles, which see most, come first
    library: requests
    """

    whole: list[int] = field(default_factory=list)
    rounds: list[SplitRound] = field(default_factory=list)
    library: list[int] = field(default_factory=list)


def plan_extend(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    group: int,
    kv_heads: int,
    rows: int,
    block: int,
    window: int = 0,
    pairs: bool = False,
    has_library: bool = False,
    skip: Collection[int] = (),
) -> ExtendPlan:
    """`group`: query heads of a kv head; `rows`: of a tile; `block`: tokens that a program takes at a time; `window`: of CacheSpec.

    `pairs`: rows of whole requests are (token, head) pairs, too. `skip`: requests that others compute.
    """
    plan = ExtendPlan()
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if request in skip:
            continue
        tiles = -(-q_len * group // rows)
        hidden = first_seen(kv_len - q_len, window) // block * block
        context = kv_len - hidden
        span = span_tokens(context, programs=tiles * kv_heads, block=block)
        if span < context:
            parts = q_len * group * -(-context // span) * kv_heads  # at most
            if not plan.rounds or plan.rounds[-1].part_rows * kv_heads + parts > MOST_PARTS:
                plan.rounds.append(SplitRound())
            begins = range(hidden, kv_len, span)
            _split(plan.rounds[-1], request, q_len, kv_len, begins=begins, group=group, rows=rows, window=window)
        elif has_library and kv_len > MOST_WHOLE:
            plan.library.append(request)
        else:
            for tile in reversed(range(tiles if pairs else -(-q_len // rows))):
                plan.whole += (request, tile)
    return plan


def first_seen(position: int, window: int) -> int:
    """Return the first token that a query at `position` sees. `window`: of CacheSpec."""
    return max(0, position + 1 - window) if window else 0


def span_tokens(context: int, *, programs: int, block: int) -> int:
    """Return the tokens of a span, a multiple of `block`; `context` or more: no split. `programs`: of one span."""
    if context <= MOST_WHOLE:
        return context
    spans = min(PROGRAMS // programs, MOST_SPANS, context // MIN_SPAN)
    return -(-context // (block * max(spans, 1))) * block


def _split(
    into: SplitRound, request: int, q_len: int, kv_len: int, *, begins: range, group: int, rows: int, window: int
) -> None:
    """`begins`: of the request's spans."""
    part_row, parts, span, before = into.part_rows, [], begins.step, kv_len - q_len
    for tile in range(-(-q_len * group // rows)):
        height = min(rows, q_len * group - tile * rows)
        first = first_seen(before + tile * rows // group, window)  # of the tile's first row
        seen = before + (tile * rows + height - 1) // group + 1  # by its last one
        mine = [begin for begin in begins if first < begin + span and begin < seen]
        into.merges += (request, tile, part_row, len(mine))
        for begin in mine:
            parts.append((begin, tile, min(begin + span, seen), part_row))
            part_row += height
        into.most_rows = max(into.most_rows, height)
    for begin, tile, end, at in sorted(parts):  # tiles of one span beside one another: they read the same K and V
        into.split += (request, tile, begin, end, at)
    into.part_rows = part_row
