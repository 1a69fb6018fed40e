"""Page keys (page_keys.py) of a request's tokens, computed once per request."""

from engine.core.page_keys import KVIdentity, next_keys
from engine.core.request import Request


class RequestKeys:
    """`run_id`: unique for this process. An adapter's number means nothing in another process, and files outlive ours."""

    def __init__(self, identity: KVIdentity, *, run_id: str) -> None:
        self.identity = identity
        self._run_id = run_id

    def of(self, request: Request, num_pages: int) -> list[bytes]:
        """Keys of the first `num_pages` pages of `request`, which are whole. The only place that begins a chain."""
        extra = f"adapter {request.adapter} of {self._run_id}" if request.adapter else ""
        seed, size, known = self.identity.seed(extra), self.identity.page_size, request.lower_tiers
        if known.seed != seed:
            known.keys, known.seed = [], seed
        keys = known.keys
        if len(keys) < num_pages:
            tokens = request.tokens(len(keys) * size, num_pages * size)
            keys += next_keys(keys[-1] if keys else seed, tokens, size)
        return keys[:num_pages]
