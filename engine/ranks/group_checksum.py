"""Checksum of transferred KV over all ranks of a group."""

import logging
import secrets
from collections.abc import Sequence

from engine.kv.held import CopiesDiffer, total
from engine.ranks.followers import Followers
from engine.ranks.rank_checksum import OwnChecksum, Tail, Value

log = logging.getLogger(__name__)


class GroupChecksum:
    """Checksum over all ranks' parts, the leader's by `own`.

    Peers write every copy of a part, so each is checked; different copies give a random value.
    """

    def __init__(self, own: OwnChecksum, followers: Followers) -> None:
        self._own = own
        self._followers = followers

    def __call__(self, pages: Sequence[int], tail: Tail = (), num_tokens: int | None = None) -> Value:
        beside = [list(items) for items in tail]
        theirs = self._followers.apply("checksum", pages=list(pages), tail=beside, num_tokens=num_tokens)
        own, found = self._own(pages, tail, num_tokens), list[int]()  # once available; answers are gone then

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
