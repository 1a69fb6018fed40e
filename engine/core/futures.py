"""Plan-time checks that no sampled, uncollected token is lost.

The device has one cell per slot (engine/executor/future_map.py). Steps run in plan order, reads
before writes. One cell suffices if each step that samples over a sample in flight also reads it,
and slots change owner with nothing in flight.

    token at position   known-1 | known ... known+pending-2 | known+pending-1 | not planned
                        on host | in flight and read already | in flight, in the cell
"""

from engine.core.request import Request


def check_reads(request: Request, start: int, end: int) -> None:
    """Check that tokens start..end-1 are known, or end with the cell's."""
    known, pending = request.num_tokens, request.pending
    if pending == 0:
        assert end <= known, (
            f"{request.rid}: position {end - 1} is read, and only {known} tokens are known or in flight"
        )
    else:
        last = known + pending - 1
        assert (start, end) == (last, last + 1), f"{request.rid}: positions {start}..{end - 1}, the cell holds {last}"


def check_no_future(request: Request) -> None:
    assert request.pending == 0, f"{request.rid}: its slot is given back with {request.pending} samples in flight"
