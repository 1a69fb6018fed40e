"""A bounded store of responses: the least recently used goes first, and a conversation from its end. Pure.

    resp_1 <- resp_2 <- resp_3       previous_response_id; to read resp_3 is to read all three
                     <- resp_4

Reading a response makes its ancestors the most recently used. So none is evicted before its descendants, and no stored response loses
its beginning, except by `remove`.
"""

from collections import OrderedDict

import msgspec

OVERHEAD_BYTES = 512  # of an entry, beside its texts


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`owner`: what may read it. `previous`: the id of the response before it; "": none.

    `input`: JSON text of its own input items, with commas between them; `response`: the JSON object as the client received it.
    """

    id: str
    owner: str
    previous: str
    input: bytes
    response: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.input) + len(self.response) + OVERHEAD_BYTES


MAX_BYTES = 64 << 20  # of the answers that a server keeps: a thousand long ones


class ResponseStore:
    """At most `max_count` responses of `max_bytes` together."""

    def __init__(self, *, max_count: int, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._max_count, self._max_bytes = max_count, max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, stored: StoredResponse) -> None:
        """Keep it, unless its id is known: a response does not change. One too large, with its ancestors, is evicted at once."""
        if stored.id in self._responses:
            return
        self._responses[stored.id] = stored
        self.num_bytes += stored.num_bytes
        self._touch(stored)
        while len(self._responses) > self._max_count or self.num_bytes > self._max_bytes:
            _, evicted = self._responses.popitem(last=False)
            self.num_bytes -= evicted.num_bytes

    def get(self, id: str, *, owner: str) -> StoredResponse | None:
        stored = self._owned(id, owner)
        self._touch(stored)
        return stored

    def conversation(self, id: str, *, owner: str) -> list[StoredResponse]:
        """The response and its ancestors, newest first, as far as they are here; empty if it is not."""
        found: list[StoredResponse] = []
        stored = self.get(id, owner=owner)
        while stored is not None and len(found) < len(self._responses):
            found.append(stored)
            stored = self._owned(stored.previous, owner)
        return found

    def remove(self, id: str, *, owner: str) -> bool:
        """Forget it; what follows it stays, and can be read but not continued."""
        stored = self._owned(id, owner)
        if stored is None:
            return False
        del self._responses[id]
        self.num_bytes -= stored.num_bytes
        return True

    def check(self) -> None:
        assert self.num_bytes == sum(stored.num_bytes for stored in self._responses.values())
        assert len(self._responses) <= self._max_count and self.num_bytes <= self._max_bytes
        order = list(self._responses)
        for at, stored in enumerate(self._responses.values()):
            assert stored.previous not in order[:at], (stored.previous, stored.id)

    def _owned(self, id: str, owner: str) -> StoredResponse | None:
        stored = self._responses.get(id)
        return stored if stored is not None and stored.owner == owner else None

    def _touch(self, stored: StoredResponse | None) -> None:
        """Make it and its ancestors the most recently used, the oldest ancestor last."""
        for _ in range(len(self._responses)):  # a bound: no input can make a circle
            if stored is None:
                return
            self._responses.move_to_end(stored.id)
            stored = self._responses.get(stored.previous)
