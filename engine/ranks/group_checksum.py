"""A checksum of KV pages over all ranks of a group."""

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.kv.held import combine
from engine.ranks.followers import Followers

Value = Callable[[], int | None]  # None: the device has not come to it; ask again


class RankChecksum(Protocol):
    """Of one rank, such as `PageChecksum`."""

    def __call__(self, pages: Sequence[int]) -> Value: ...


class GroupChecksum:
    """As `PageChecksum`, of what all ranks hold. `ranks`: hold everything once, with the leader."""

    def __init__(self, own: RankChecksum, followers: Followers, *, ranks: Sequence[int]) -> None:
        self._own = own
        self._followers = followers
        self._ranks = frozenset(ranks)

    def __call__(self, pages: Sequence[int]) -> Value:
        theirs, own = self._followers.apply("checksum", pages=list(pages)), self._own(pages)
        found: list[int] = []  # once it is there; the answers are gone then

        def value() -> int | None:
            mine = own()
            if mine is None or not (found or theirs.there()):
                return None
            if not found:
                found.append(combine([mine, *(part for rank, part in theirs.wait().items() if rank in self._ranks)]))
            return found[0]

        return value
