"""One worker's prefix cache by its KV events. Pure.

After a gap (`on_message`) its reader requests the messages (`on_replay`) or drops the view
(`lose`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

from router.choice.prefix_index import PrefixIndex
from service.kv_events import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    TOKEN_BYTES,
    AllBlocksCleared,
    AnyEvent,
    BlockHash,
    BlockRemoved,
    BlockStored,
    NamesRemoved,
    NamesStored,
    block_names,
    name_of,
    next_link,
    open_chain,
    token_bytes,
    token_seed,
)

MAX_BLOCKS = 1 << 20  # per worker; further ones are ignored


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Blocks of `size` tokens of one event.

    links   from the last key before the run on; empty: prompt start unknown
    data    token bytes from `links[0]` on, `first` of them before the run
    keys    that end in the run
    """

    size: int
    first: int = 0
    data: bytes = b""
    links: Sequence[bytes] = ()
    keys: Sequence[int] = ()
    step: int = field(init=False)  # bytes of a block

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", self.size * TOKEN_BYTES)

    def keys_of(self, place: int) -> Sequence[int]:
        if not self.keys:
            return ()
        end = self.first + (place + 1) * self.step
        return self.keys[(end - self.step) // BLOCK_BYTES : end // BLOCK_BYTES]

    def followed_by(self, place: int, size: int, tokens: list[int]) -> "_Run":
        if not self.links:
            return _Run(size)
        end = self.first + (place + 1) * self.step
        whole = end // BLOCK_BYTES
        rest = self.data[whole * BLOCK_BYTES : end]
        try:
            data = rest + token_bytes(tokens)
        except OverflowError:
            return _Run(size)
        links = [self.links[whole]]
        for at in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
            links.append(next_link(links[-1], data[at : at + BLOCK_BYTES]))
        return _Run(size, len(rest), data, links, [name_of(link) for link in links[1:]])


_Block = tuple[_Run, int]  # and its position there
_UNKNOWN: _Block = (_Run(0), -1)


class TokenBlocks:
    """Blocks of a worker with its own hashes: keys come from token ids.

    Its blocks differ from those of our keys, so a block is a position in the run of its event, and
    the run keeps the hash chain (kv_events.py).
    """

    def __init__(self, index: PrefixIndex, worker_id: int) -> None:
        self._index = index
        self._worker_id = worker_id
        self._blocks: dict[BlockHash, _Block] = {}
        self.num_tokens = 0

    def store(self, event: BlockStored | NamesStored) -> None:
        assert isinstance(event, BlockStored)
        size = event.block_size
        if size < 1 or len(event.token_ids) != size * len(event.block_hashes):
            return
        hashes = event.block_hashes[: MAX_BLOCKS - len(self._blocks)]
        before, place = self._before(event), 0
        is_new = self._blocks.keys().isdisjoint(hashes) and len(set(hashes)) == len(hashes)
        while place < len(hashes):
            known = None if is_new else self._blocks.get(hashes[place])
            if known is None:
                end = len(hashes) if is_new else place + 1
                before = self._add(before, event, hashes[place:end], place)
                place = end
            else:
                before = known
                self._index.store_all(self._worker_id, known[0].keys_of(known[1]))
                place += 1

    def remove(self, event: BlockRemoved | NamesRemoved) -> None:
        """Fast for the many that complete no key."""
        assert isinstance(event, BlockRemoved)
        pop, index, tokens = self._blocks.pop, self._index, 0
        for block_hash in event.block_hashes:
            block = pop(block_hash, None)
            if block is None:
                continue
            run, place = block
            tokens += run.size
            if (run.first + (place + 1) * run.step) % BLOCK_BYTES < run.step:
                index.remove_all(self._worker_id, run.keys_of(place))
        self.num_tokens -= tokens

    def clear(self) -> None:
        self._blocks.clear()
        self.num_tokens = 0

    def _add(self, before: _Block, event: BlockStored, hashes: list[BlockHash], place: int) -> _Block:
        size, count = event.block_size, len(hashes)
        run = before[0].followed_by(before[1], size, event.token_ids[place * size : (place + count) * size])
        self._blocks.update(zip(hashes, zip(repeat(run), range(count)), strict=True))
        self.num_tokens += size * count
        self._index.store_all(self._worker_id, run.keys)
        return run, count - 1

    def _before(self, event: BlockStored) -> _Block:
        """The parent block, unknown for adapters without name."""
        if event.lora_id is not None and event.lora_name is None:
            return _UNKNOWN
        if event.parent_block_hash is None:
            return _Run(0, links=(open_chain(token_seed(event.lora_name or "", _namespace(event))),)), -1
        return self._blocks.get(event.parent_block_hash) or _UNKNOWN


def _namespace(event: BlockStored) -> list[str]:
    keys = event.extra_keys
    first = keys[0] if isinstance(keys, list) and keys else None
    return [str(key) for key in first] if isinstance(first, list) else []


# ---- kv view


class WorkerCacheView:
    """`whole`: all events are known. `named`: hashes are our keys."""

    def __init__(self, index: PrefixIndex, worker_id: int, *, named: bool = False) -> None:
        self._index = index
        self._worker_id = worker_id
        self._blocks: NamedBlocks | TokenBlocks = (NamedBlocks if named else TokenBlocks)(index, worker_id)
        self.next = 0  # number of the first unknown message
        self._last_live = -1
        self.whole = True
        self.num_gaps = 0

    @property
    def num_tokens(self) -> int:
        return self._blocks.num_tokens

    def on_message(self, seq: int, events: Sequence[AnyEvent]) -> int | None:
        """Apply a message, or return the first missing number."""
        if seq <= self._last_live:  # numbers only grow, so the worker has restarted
            self._clear()
            self.next, self._last_live, self.whole = 0, -1, True
        if seq > self.next:
            return self.next
        self._last_live = seq
        if seq == self.next:
            self._apply(seq, events)
        return None

    def on_replay(self, seq: int, events: Sequence[AnyEvent]) -> None:
        """Apply a requested message; unknown older ones are lost."""
        if seq > self.next:
            self.lose()
        if seq >= self.next:
            self._apply(seq, events)

    def skip_to(self, seq: int) -> None:
        if seq > self.next:
            self.lose()
            self.next = seq

    def lose(self) -> None:
        self._clear()
        self.whole = False
        self.num_gaps += 1

    def _clear(self) -> None:
        self._index.forget(self._worker_id)
        self._blocks.clear()

    def _apply(self, seq: int, events: Sequence[AnyEvent]) -> None:
        self.next = seq + 1
        removed = False
        for event in events:
            match event:
                case BlockStored() | NamesStored():
                    self._blocks.store(event)
                case BlockRemoved() | NamesRemoved():
                    removed = True
                    self._blocks.remove(event)
                case AllBlocksCleared():
                    self._index.clear(self._worker_id)
                    self._blocks.clear()
                    self.whole = True
        if removed and self.whole:  # prompts sent there are only presumed cached: at most as many as fit
            self._index.shrink(self._worker_id, -(-self._blocks.num_tokens // BLOCK_TOKENS))


class NamedBlocks:
    def __init__(self, index: PrefixIndex, worker_id: int) -> None:
        self._index = index
        self._worker_id = worker_id
        self._size = 0
        self.num_tokens = 0

    def store(self, event: BlockStored | NamesStored) -> None:
        assert isinstance(event, NamesStored)
        self._size = event.block_size
        self.num_tokens += self._size * len(event.block_hashes)
        self._index.store_all(self._worker_id, block_names(event.block_hashes, self._size))

    def remove(self, event: BlockRemoved | NamesRemoved) -> None:
        assert isinstance(event, NamesRemoved)
        self.num_tokens = max(0, self.num_tokens - self._size * len(event.block_hashes))
        self._index.remove_all(self._worker_id, event.block_hashes)

    def clear(self) -> None:
        self.num_tokens = 0
