"""States of host tier pages.

    take             name                 pin
FREE ----> PINNED ---------> NAMED, IDLE ------> NAMED, PINNED     pinned: in use by a copy or
 ^           |  (nameless)      |    ^  <------                    file operation, perhaps of
 |  unpin    |                  |           unpin                  a step in flight
 +-----------+ <----------------+
                 evict (least recently used), forget
"""

from collections import OrderedDict
from collections.abc import Iterable


class HostPages:
    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 1
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # popped from the end: low ids first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._pins: dict[int, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # LRU order of named, unpinned pages

    @property
    def num_named(self) -> int:
        return len(self._page_of)

    def get(self, key: bytes) -> int | None:
        return self._page_of.get(key)

    def key_of(self, page: int) -> bytes | None:
        return self._key_of.get(page)

    def take(self) -> int | None:
        """Take a pinned, nameless page, perhaps evicting one; None if all are pinned."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            key, _ = self._idle.popitem(last=False)
            page = self._page_of.pop(key)
            del self._key_of[page]
        else:
            return None
        self._pins[page] = 1
        return page

    def is_pinned(self, page: int) -> bool:
        return page in self._pins

    def next_to_go(self) -> int | None:
        if self._free or not self._idle:
            return None
        return self._page_of[next(iter(self._idle))]

    def name(self, page: int, key: bytes) -> None:
        """Name `page`, valid after the copy that pins it."""
        assert page in self._pins and page not in self._key_of and key not in self._page_of
        self._page_of[key], self._key_of[page] = page, key

    def pin(self, page: int) -> None:
        key = self._key_of[page]
        self._pins[page] = self._pins.get(page, 0) + 1
        self._idle.pop(key, None)

    def unpin(self, page: int) -> None:
        """End an operation; named pages become evictable, nameless ones free."""
        self._pins[page] -= 1
        if self._pins[page] > 0:
            return
        del self._pins[page]
        key = self._key_of.get(page)
        if key is None:
            self._free.append(page)
        else:
            self._idle[key] = None

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark pages used; pass a chain from its end, to evict that first."""
        for key in keys:
            if key in self._idle:
                self._idle.move_to_end(key)

    def forget_all(self) -> None:
        for key, page in self._page_of.items():
            del self._key_of[page]
            if key in self._idle:
                self._free.append(page)
        self._page_of.clear()
        self._idle.clear()

    def check(self) -> None:
        idle = [self._page_of[key] for key in self._idle]
        assert sorted([*self._free, *idle, *self._pins]) == list(range(self.num_pages)), "host pages: lost or doubled"
        assert all(count > 0 for count in self._pins.values())
        assert {page: key for key, page in self._page_of.items()} == self._key_of
        assert set(self._idle) == {key for key, page in self._page_of.items() if page not in self._pins}
