"""A pair of workers for a request that names a DP rank: `routed_dp_rank`, or X-data-parallel-rank. Pure.

The rank serves at both workers. A worker with a single rank beside one with several gets no rank.
"""

from collections.abc import Mapping

from router.body import ParsedBody, without_dp_rank
from router.pool.worker import Worker
from service.http.dp_rank import RANK_HEADER


def asked_of(
    worker: Worker, peer: Worker, parsed: ParsedBody, headers: Mapping[str, str]
) -> tuple[ParsedBody, Mapping[str, str]]:
    """Return the body and headers for one of the two."""
    if worker.ranks.dp > 1 or peer.ranks.dp == 1:
        return parsed, headers
    return without_dp_rank(parsed), {name: value for name, value in headers.items() if name != RANK_HEADER}
