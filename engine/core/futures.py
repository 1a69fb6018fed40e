"""Tokens that are sampled but not collected yet: which steps may read them, and that none is lost. Checks at plan time.

The device keeps one cell for each slot (engine/executor/future_map.py): the last token that the slot sampled. Steps run in
the order of their plans, and inside a step all reads come before all writes. So the cell of a slot, when a step reads it,
holds the last sample planned before that step. One cell is enough if every step that samples for a slot with a sample in
flight also reads it: what it overwrites has been read. And a cell never serves another request if a slot changes hands
only when nothing of its owner is in flight. Both are asserted here, on the host, for every item: no ring of cells is
needed, and no wait for the device.

    token at position   known-1 | known ... known+pending-2 | known+pending-1 | not planned
                        on host | in flight and read already | in flight, in the cell
"""

from engine.core.request import Request


def check_reads(request: Request, start: int, end: int) -> None:
    """Planning tokens start..end-1: with samples in flight just the one in the cell, else only what the host knows."""
    known, pending = request.num_tokens, request.pending
    if pending == 0:
        assert end <= known, (
            f"{request.rid}: position {end - 1} is read, and only {known} tokens are known or in flight"
        )
    else:
        last = known + pending - 1
        assert (start, end) == (last, last + 1), f"{request.rid}: positions {start}..{end - 1}, the cell holds {last}"


def check_no_future(request: Request) -> None:
    """Its slot is about to belong to another request."""
    assert request.pending == 0, f"{request.rid}: its slot is given back with {request.pending} samples in flight"
