"""Which worker has which prompt prefixes in its cache, as far as a router can know. Pure.

One table for all workers: key of a prefix (router/choice/prefix_keys.py) -> a bit per worker. As a key names everything
before it, too, this *is* the prefix tree, and a look-up walks one path of it whatever the number of workers.

    guessed   a request with this prefix was sent there; forgotten least recently used first, `max_blocks` per worker
    told      the worker said so by a KV event, and will say when it is gone

A worker that leaves is ignored at once; its entries go in slices, a few with each later request, so that no request
waits for 100,000 of them.

The idea of the tree is SGLang's router (sgl-router's cache_aware policy); theirs keeps characters, per worker.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

Group = tuple[int, int]

SWEEP = 256  # entries of workers that left, dropped by each request


class _Part:
    """What one worker has. Its keys are the ones whose entry shows `bit`."""

    __slots__ = ("bit", "guessed", "told")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.guessed: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self.told: set[bytes] = set()


class PrefixMatch:
    """Which workers have how much of a prompt. Good until the index changes.

    `groups`: (prefixes, the bits of those that have so many and no more), the fewest first: thousands of workers that have the same
    system prompt are one of them.
    """

    __slots__ = ("_owner", "_parts", "groups")

    def __init__(self, groups: list[Group], owner: Mapping[int, int], parts: Mapping[int, _Part]) -> None:
        self.groups = groups
        self._owner = owner
        self._parts = parts

    def depth(self, worker_id: int) -> int:
        """How many prefixes a worker has."""
        part = self._parts.get(worker_id)
        if part is None:
            return 0
        return next((depth for depth, bits in self.groups if bits & part.bit), 0)

    def has(self, worker_id: int, bits: int) -> bool:
        """Whether a worker is among those of a group."""
        part = self._parts.get(worker_id)
        return part is not None and bool(bits & part.bit)

    def ids(self, bits: int) -> Iterator[int]:
        """The workers of a group."""
        while bits:
            low = bits & -bits
            yield self._owner[low.bit_length() - 1]
            bits ^= low

    def depths(self) -> dict[int, int]:
        """Worker id -> prefixes, of all that have any."""
        return {worker_id: depth for depth, bits in self.groups for worker_id in self.ids(bits)}


class PrefixIndex:
    def __init__(self, *, max_blocks: int) -> None:
        assert max_blocks >= 1
        self._max_blocks = max_blocks
        self._holders: dict[bytes, int] = {}
        self._parts: dict[int, _Part] = {}
        self._owner: dict[int, int] = {}  # bit position -> worker id, of live workers
        self._live = 0  # their bits
        self._free: list[int] = []  # bit positions that no entry shows any more
        self._num_bits = 0
        self._leaving: list[_Part] = []

    def match(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Worker id -> how many of `keys`, from the first, it has; workers without the first are left out."""
        return self.holders(keys).depths()

    def holders(self, keys: Sequence[bytes]) -> "PrefixMatch":
        """The same, in groups."""
        groups: list[Group] = []
        holders, with_all = self._holders, self._live
        for depth, key in enumerate(keys):
            now = holders.get(key, 0) & with_all
            if now != with_all:
                if depth:
                    groups.append((depth, with_all & ~now))
                with_all = now
                if not now:
                    return PrefixMatch(groups, self._owner, self._parts)
        if keys and with_all:
            groups.append((len(keys), with_all))
        return PrefixMatch(groups, self._owner, self._parts)

    def touch(self, worker_id: int, keys: Sequence[bytes]) -> None:
        """A request with these prefixes goes to this worker. Its longest is the first to be forgotten."""
        part = self._part(worker_id)
        guessed, told, holders, bit = part.guessed, part.told, self._holders, part.bit
        for key in reversed(keys):
            if key in guessed:
                guessed.move_to_end(key)
            elif key not in told:
                guessed[key] = None
                holders[key] = holders.get(key, 0) | bit
        self._trim(part, self._max_blocks)
        self._sweep()

    def store(self, worker_id: int, key: bytes) -> None:
        """The worker says that it has this prefix. More than `max_blocks` of them are not believed."""
        part = self._part(worker_id)
        if len(part.told) < self._max_blocks:
            part.guessed.pop(key, None)
            part.told.add(key)
            self._holders[key] = self._holders.get(key, 0) | part.bit

    def remove(self, worker_id: int, key: bytes) -> None:
        """The worker says that it is gone."""
        part = self._part(worker_id)
        if key in part.told:
            part.told.discard(key)
            self._clear(key, part.bit)
        elif key in part.guessed:
            del part.guessed[key]
            self._clear(key, part.bit)

    def shrink(self, worker_id: int, num_blocks: int) -> None:
        """The worker's cache holds so many blocks: guesses beyond that are wrong, the oldest first."""
        part = self._part(worker_id)
        self._trim(part, max(0, num_blocks - len(part.told)))

    def forget(self, worker_id: int) -> None:
        """The worker is gone, or its cache is empty."""
        part = self._parts.pop(worker_id, None)
        if part is not None:
            position = part.bit.bit_length() - 1
            del self._owner[position]
            self._live &= ~part.bit
            self._leaving.append(part)

    def num_blocks(self, worker_id: int) -> int:
        """Prefixes known of a worker."""
        part = self._parts.get(worker_id)
        return 0 if part is None else len(part.guessed) + len(part.told)

    def __len__(self) -> int:
        return len(self._holders)

    # ---- inside

    def _part(self, worker_id: int) -> _Part:
        part = self._parts.get(worker_id)
        if part is None:
            position = self._free.pop() if self._free else self._num_bits
            self._num_bits = max(self._num_bits, position + 1)
            part = self._parts[worker_id] = _Part(1 << position)
            self._owner[position] = worker_id
            self._live |= part.bit
        return part

    def _trim(self, part: _Part, limit: int) -> None:
        while len(part.guessed) > limit:
            self._clear(part.guessed.popitem(last=False)[0], part.bit)

    def _clear(self, key: bytes, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]

    def _sweep(self) -> None:
        """Drop some entries of workers that left; a bit whose last one is gone may be given to another worker."""
        budget = SWEEP
        while self._leaving and budget:
            part = self._leaving[-1]
            while budget and (part.guessed or part.told):
                key = part.guessed.popitem()[0] if part.guessed else part.told.pop()
                self._clear(key, part.bit)
                budget -= 1
            if not part.guessed and not part.told:
                self._leaving.pop()
                self._free.append(part.bit.bit_length() - 1)

    def check(self) -> None:
        """Every entry shows exactly the workers that have it, and no table is larger than its bound."""
        expected: dict[bytes, int] = {}
        for part in self._all_parts():
            assert not part.told & part.guessed.keys()
            assert len(part.guessed) <= self._max_blocks and len(part.told) <= self._max_blocks
            for key in (*part.guessed, *part.told):
                expected[key] = expected.get(key, 0) | part.bit
        assert expected == self._holders
        assert self._live == sum(part.bit for part in self._parts.values())
        positions = [part.bit.bit_length() - 1 for part in self._all_parts()] + self._free
        assert sorted(positions) == list(range(self._num_bits))

    def _all_parts(self) -> Iterator[_Part]:
        yield from self._parts.values()
        yield from self._leaving
