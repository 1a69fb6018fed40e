"""Live samples of each DP rank."""

from engine.frontend.client.dp_policy import RankLoad
from engine.frontend.client.shared_requests import SharedRequests


class RankLoads:
    """Load of each rank. `shared`: with other frontends, if any."""

    def __init__(self, num_ranks: int, shared: SharedRequests | None) -> None:
        self._own = [RankLoad() for _ in range(num_ranks)]
        self._shared = shared

    @property
    def num_live(self) -> int:
        return sum(load.requests for load in self._own) if self._shared is None else self._shared.num_live

    def of_all(self) -> list[RankLoad]:
        return self._own if self._shared is None else self._shared.loads()

    def change(self, rank: int, *, requests: int = 0, tokens: int = 0) -> None:
        load = self._own[rank]
        load.requests += requests
        load.tokens += tokens
        if self._shared is not None:
            self._shared.publish(load.requests, rank=rank, num_tokens=load.tokens)
