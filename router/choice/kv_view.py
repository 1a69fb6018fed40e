"""One worker's prefix cache by its KV events, entered into the prefix index. Pure.

Workers name blocks of their page size by hashes of their own; the index has a key of ours for each BLOCK_TOKENS tokens. So each block
is kept as a place in the run of blocks that came with it, and the run with the hashes over its prompt (router/choice/prefix_keys.py).

Messages are numbered. `on_message` returns from where on they are missing; the reader of the sockets requests them (`on_replay`)
or drops the view (`lose`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING

from router.choice.prefix_index import PrefixIndex
from router.choice.prefix_keys import BLOCK_BYTES, BLOCK_TOKENS, TOKEN_BYTES, open_chain, token_bytes, token_seed
from service.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent

if TYPE_CHECKING:
    from hashlib import _Hash

MAX_BLOCKS = 1 << 20  # of one worker; more are not believed


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Blocks of `size` tokens that came in one event. `states`: the hash over the prompt at each end of a block of ours, from the last
    one before the run on; empty: the start of the prompt is unknown.

        data    the token bytes from `states[0]` on: `first` of them are those before the run
        keys    of the blocks of ours that end in the run
    """

    size: int
    first: int = 0
    data: bytes = b""
    states: Sequence["_Hash"] = ()
    keys: Sequence[bytes] = ()
    step: int = field(init=False)  # bytes of a block

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", self.size * TOKEN_BYTES)

    def keys_of(self, place: int) -> Sequence[bytes]:
        """Those that the block at `place` has completed."""
        if not self.keys:
            return ()
        end = self.first + (place + 1) * self.step
        return self.keys[(end - self.step) // BLOCK_BYTES : end // BLOCK_BYTES]

    def followed_by(self, place: int, size: int, tokens: list[int]) -> "_Run":
        """The run behind the block at `place`; -1: at the beginning of this one."""
        if not self.states:
            return _Run(size)
        end = self.first + (place + 1) * self.step
        whole = end // BLOCK_BYTES
        rest = self.data[whole * BLOCK_BYTES : end]
        try:
            data = rest + token_bytes(tokens)
        except OverflowError:
            return _Run(size)
        running, states, keys = self.states[whole], [self.states[whole]], []
        for at in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
            running = running.copy()
            running.update(data[at : at + BLOCK_BYTES])
            states.append(running)
            keys.append(running.digest())
        return _Run(size, len(rest), data, states, keys)


_Block = tuple[_Run, int]  # and its place there
_UNKNOWN: _Block = (_Run(0), -1)


class WorkerCacheView:
    """`whole`: every event since the worker's cache was empty is known."""

    def __init__(self, index: PrefixIndex, worker_id: int) -> None:
        self._index = index
        self._worker_id = worker_id
        self._blocks: dict[BlockHash, _Block] = {}
        self.next = 0  # number of the first message that is not known
        self._last_live = -1
        self.num_tokens = 0
        self.whole = True
        self.num_gaps = 0
        self.num_messages = 0  # applied

    def on_message(self, seq: int, events: list[KVEvent]) -> int | None:
        """Take a published message. Returns the number from which on messages are missing, this one included; None: none are."""
        if seq <= self._last_live:  # numbers only grow: the worker has restarted
            self._clear()
            self.next, self._last_live, self.whole = 0, -1, True
        if seq > self.next:
            return self.next
        self._last_live = seq
        if seq == self.next:
            self._apply(seq, events)
        return None

    def on_replay(self, seq: int, events: list[KVEvent]) -> None:
        """Take a message that was requested; unknown older ones are lost."""
        if seq > self.next:
            self.lose()
        if seq >= self.next:
            self._apply(seq, events)

    def skip_to(self, seq: int) -> None:
        """Messages before `seq` cannot be had: drop everything and expect `seq`."""
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
        self.num_tokens = 0

    def _apply(self, seq: int, events: list[KVEvent]) -> None:
        self.next = seq + 1
        self.num_messages += 1
        removed = False
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved(block_hashes=hashes):
                    removed = True
                    self._remove(hashes)
                case AllBlocksCleared():
                    self._clear()
                    self.whole = True
        if removed and self.whole:  # text that we sent there is a guess: no more of it than fits
            self._index.shrink(self._worker_id, -(-self.num_tokens // BLOCK_TOKENS))

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        if size < 1 or len(event.token_ids) != size * len(event.block_hashes):
            return
        hashes = event.block_hashes[: MAX_BLOCKS - len(self._blocks)]
        before, place, is_new = self._before(event), 0, self._are_new(hashes)
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

    def _are_new(self, hashes: list[BlockHash]) -> bool:
        """Whether each is new, and comes once: nearly always."""
        return self._blocks.keys().isdisjoint(hashes) and len(set(hashes)) == len(hashes)

    def _add(self, before: _Block, event: BlockStored, hashes: list[BlockHash], place: int) -> _Block:
        """Take new blocks of an event, from the one at `place` on. Returns the last."""
        size, count = event.block_size, len(hashes)
        run = before[0].followed_by(before[1], size, event.token_ids[place * size : (place + count) * size])
        self._blocks.update(zip(hashes, zip(repeat(run), range(count)), strict=True))
        self.num_tokens += size * count
        self._index.store_all(self._worker_id, run.keys)
        return run, count - 1

    def _before(self, event: BlockStored) -> _Block:
        """The block that the event continues; an unknown one for KV of an adapter: requests may name it otherwise."""
        if event.lora_id is not None or event.lora_name is not None:
            return _UNKNOWN
        if event.parent_block_hash is None:
            return _Run(0, states=(open_chain(token_seed(namespace=_namespace(event))),)), -1
        return self._blocks.get(event.parent_block_hash) or _UNKNOWN

    def _remove(self, hashes: Sequence[BlockHash]) -> None:
        """Most blocks have completed no key: that costs least."""
        pop, index, tokens = self._blocks.pop, self._index, 0
        for block_hash in hashes:
            block = pop(block_hash, None)
            if block is None:
                continue
            run, place = block
            tokens += run.size
            if (run.first + (place + 1) * run.step) % BLOCK_BYTES < run.step:
                index.remove_all(self._worker_id, run.keys_of(place))
        self.num_tokens -= tokens


def _namespace(event: BlockStored) -> list[str]:
    """The extra keys of the first block, as text: what is no namespace is in no request, either."""
    keys = event.extra_keys
    first = keys[0] if isinstance(keys, list) and keys else None
    return [str(key) for key in first] if isinstance(first, list) else []
