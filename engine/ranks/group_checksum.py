"""A checksum of KV pages over all ranks of a group."""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from engine.kv.held import combine
from engine.ranks.followers import Followers

log = logging.getLogger(__name__)

Value = Callable[[], int | None]  # None: the device has not come to it; ask again


class RankChecksum(Protocol):
    """Of one rank, such as `PageChecksum`."""

    def __call__(self, pages: Sequence[int]) -> Value: ...


class GroupChecksum:
    """As `PageChecksum`, of what all ranks hold. `leader`: the rank of `own`. `copies`: ranks that hold the same, for each part.

    A peer's ranks write each copy, so each one is checked. Where two differ the value is a random one, which no peer's equals.
    """

    def __init__(
        self, own: RankChecksum, followers: Followers, *, leader: int, copies: Sequence[Sequence[int]]
    ) -> None:
        self._own = own
        self._followers = followers
        self._leader = leader
        self._copies = copies

    def __call__(self, pages: Sequence[int]) -> Value:
        theirs, own = self._followers.apply("checksum", pages=list(pages)), self._own(pages)
        found: list[int] = []  # once it is there; the answers are gone then

        def value() -> int | None:
            mine = own()
            if mine is None or not (found or theirs.there()):
                return None
            if not found:
                found.append(self._total({self._leader: mine, **theirs.wait()}))
            return found[0]

        return value

    def _total(self, values: Mapping[int, int]) -> int:
        for ranks in self._copies:
            if len({values[rank] for rank in ranks}) > 1:
                log.error("ranks %s hold the same KV heads, and their pages differ", ", ".join(map(str, ranks)))
                return secrets.randbits(63)
        return combine(values[ranks[0]] for ranks in self._copies)
