"""DP rank of a request: `--load-balance-method`, as in SGLang. Pure.

A sample counts as load from its placement on, so bursts spread (SGLang issue 22614).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from engine.messages import FAKE_BOOTSTRAP_HOST, GenerateRequest
from service.flags import ConfigError
from service.http.errors import bad_field

FIELD = "routed_dp_rank"


class Rule(Enum):
    ROUND_ROBIN = auto()
    ROOM = auto()  # bootstrap_room mod ranks
    REQUESTS = auto()  # fewest
    TOKENS = auto()  # fewest; ties by requests


_RULES = {
    "round_robin": Rule.ROUND_ROBIN,
    "follow_bootstrap_room": Rule.ROOM,
    "shortest_queue": Rule.REQUESTS,
    "total_requests": Rule.REQUESTS,
    "minimum_tokens": Rule.TOKENS,
    "total_tokens": Rule.TOKENS,
}


def rule_of(method: str, *, mode: str) -> Rule:
    """`mode`: of --disaggregation-mode. Raises ConfigError."""
    if method in ("auto", "decode_round_robin"):
        return Rule.ROOM if mode == "prefill" else Rule.ROUND_ROBIN
    rule = _RULES[method]
    if rule is Rule.ROOM and mode == "null":
        raise ConfigError(
            f"--load-balance-method {method}: requests of a unified worker have no room; give round_robin, "
            "shortest_queue or minimum_tokens"
        )
    return rule


@dataclass(slots=True)
class RankLoad:
    """Live samples of a rank, and their tokens so far."""

    requests: int = 0
    tokens: int = 0


class RankPolicy:
    """`is_fixed`: peers derive the rank from the room, so clients cannot name it. `first`: rank."""

    def __init__(self, rule: Rule, *, num_ranks: int, is_fixed: bool = False, first: int = 0) -> None:
        self.num_ranks = num_ranks
        self._rule = rule
        self._is_fixed = is_fixed
        self._turn = first % num_ranks

    def place(
        self, requests: Sequence[GenerateRequest], loads: Sequence[RankLoad], *, routed: int | None = None
    ) -> list[int]:
        """Samples of one prompt share its KV on one rank. `routed`: named by the client.

        Raises ApiError(400) that names the field.
        """
        if routed is not None:
            return self._routed(requests, routed)
        counted = [replace(load) for load in loads]
        ranks: list[int] = []
        for i, request in enumerate(requests):
            room = None if request.bootstrap is None else request.bootstrap.room
            if self._rule is Rule.ROOM and room is not None:
                rank = room % self.num_ranks
            elif i and request.input_ids is requests[i - 1].input_ids:
                rank = ranks[-1]
            else:
                rank = self._choose(counted)
            counted[rank].requests += 1
            counted[rank].tokens += len(request.input_ids)
            ranks.append(rank)
        return ranks

    def _choose(self, loads: Sequence[RankLoad]) -> int:
        if self._rule is Rule.REQUESTS:
            return min(range(self.num_ranks), key=lambda r: (loads[r].requests, r))
        if self._rule is Rule.TOKENS:
            return min(range(self.num_ranks), key=lambda r: (loads[r].tokens, loads[r].requests, r))
        rank, self._turn = self._turn, (self._turn + 1) % self.num_ranks
        return rank

    def _routed(self, requests: Sequence[GenerateRequest], rank: int) -> list[int]:
        if not 0 <= rank < self.num_ranks:
            raise bad_field(
                FIELD, f"must be between 0 and {self.num_ranks - 1}, the ranks of this worker (--dp-size), got {rank}"
            )
        for at in (request.bootstrap for request in requests):
            if not self._is_fixed or at is None or at.host == FAKE_BOOTSTRAP_HOST or at.room % self.num_ranks == rank:
                continue
            raise bad_field(
                FIELD,
                f"is {rank}, and bootstrap_room {at.room} belongs to DP rank {at.room % self.num_ranks} of this prefill "
                "worker; leave it out, or start the worker with another --load-balance-method",
            )
        return [rank] * len(requests)
