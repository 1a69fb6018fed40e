"""Tokens that are sampled but not collected yet: plan-time proof that none is lost.

The device keeps one cell for each slot (engine/executor/future_map.py): the last token that the slot sampled. Steps run in
the order of their plans, and inside a step all reads come before all writes. One cell is enough, without a ring or a wait for
the device, if every step that samples for a slot with a sample in flight also reads it, and if a slot changes hands only when
nothing of its owner is in flight. Both are asserted here for every item.

    token at position   known-1 | known ... known+pending-2 | known+pending-1 | not planned
                        on host | in flight and read already | in flight, in the cell
"""

from engine.core.request import Request


def check_reads(request: Request, start: int, end: int) -> None:
    """Allow a plan of tokens start..end-1 to read the one in the cell, or without samples in flight only known ones."""
    known, pending = request.num_tokens, request.pending
    if pending == 0:
        assert end <= known, (
            f"{request.rid}: position {end - 1} is read, and only {known} tokens are known or in flight"
        )
    else:
        last = known + pending - 1
        assert (start, end) == (last, last + 1), f"{request.rid}: positions {start}..{end - 1}, the cell holds {last}"


def check_no_future(request: Request) -> None:
    """Allow the request to give up its slot."""
    assert request.pending == 0, f"{request.rid}: its slot is given back with {request.pending} samples in flight"
