"""A checksum of what a hand-over moves, over all ranks of a group."""

import logging
import secrets
from collections.abc import Callable, Sequence

from engine.kv.held import CopiesDiffer, total
from engine.ranks.followers import Followers
from engine.ranks.rank_checksum import Parts, Tail, Value

log = logging.getLogger(__name__)


class GroupChecksum:
    """Of what all ranks hold. `own`: the leader's `RankChecksum`.

    A peer's ranks write each copy of a part, so each one is checked. Where two differ the value is a random one, which no peer's equals.
    """

    def __init__(self, own: Callable[[Sequence[int], Tail], Parts], followers: Followers) -> None:
        self._own = own
        self._followers = followers

    def __call__(self, pages: Sequence[int], tail: Tail = ()) -> Value:
        theirs = self._followers.apply("checksum", pages=list(pages), tail=[list(items) for items in tail])
        own, found = self._own(pages, tail), list[int]()  # once it is there; the answers are gone then

        def value() -> int | None:
            mine = own()
            if mine is None or not (found or theirs.there()):
                return None
            if not found:
                try:
                    found.append(total([mine, *theirs.wait().values()]))
                except CopiesDiffer as error:
                    log.error("ranks hold the same %s, and their bytes differ", error)
                    found.append(secrets.randbits(63))
            return found[0]

        return value
