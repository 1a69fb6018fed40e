"""Which rank does which piece of work, decided alike on every rank, so that none has to ask. Pure.

The heaviest first, each to the rank that has least so far (LPT: Graham, "Bounds on multiprocessing timing anomalies", 1969): the
busiest rank has at most 4/3 - 1/(3 ranks) of what it has in the best division.
"""

import heapq
from collections.abc import Sequence


def deal(weights: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each piece. Of equal pieces the first goes first, of equal ranks the lowest takes it."""
    owners = [0] * len(weights)
    loads = [(0, rank) for rank in range(ranks)]
    for piece in sorted(range(len(weights)), key=lambda piece: -weights[piece]):
        load, rank = loads[0]
        owners[piece] = rank
        heapq.heapreplace(loads, (load + weights[piece], rank))
    return owners
