"""One worker's prefix cache by its KV events, entered into the prefix index. Pure.

Workers name blocks of their page size by hashes of their own; the index has a key of ours for each BLOCK_TOKENS tokens. So each block
is kept with the hash over its prompt up to there (router/choice/prefix_keys.py) and the tokens that have not filled a block of ours.

Messages are numbered. `on_message` returns from where on they are missing; the reader of the sockets requests them (`on_replay`)
or drops the view (`lose`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.choice.prefix_index import PrefixIndex
from router.choice.prefix_keys import BLOCK_BYTES, BLOCK_TOKENS, open_chain, token_bytes, token_seed
from service.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent

if TYPE_CHECKING:
    from hashlib import _Hash

MAX_BLOCKS = 1 << 20  # of one worker; more are not believed


@dataclass(frozen=True, slots=True)
class _Block:
    """`running`: the hash over all whole blocks of ours so far; None: the start of the prompt is unknown.

    `rest`: token bytes behind them; `keys`: those that this block completed.
    """

    size: int
    running: "_Hash | None" = None
    rest: bytes = b""
    keys: tuple[bytes, ...] = ()


class WorkerCacheView:
    """`whole`: every event since the worker's cache was empty is known."""

    def __init__(self, index: PrefixIndex, worker_id: int) -> None:
        self._index = index
        self._worker_id = worker_id
        self._blocks: dict[BlockHash, _Block] = {}
        self._next = 0  # number of the first message that is not known
        self._last_live = -1
        self.num_tokens = 0
        self.whole = True
        self.num_gaps = 0

    def on_message(self, seq: int, events: list[KVEvent]) -> int | None:
        """Take a published message. Returns the number from which on messages are missing, this one included; None: none are."""
        if seq <= self._last_live:  # numbers only grow: the worker has restarted
            self._clear()
            self._next, self._last_live, self.whole = 0, -1, True
        if seq > self._next:
            return self._next
        self._last_live = seq
        if seq == self._next:
            self._apply(seq, events)
        return None

    def on_replay(self, seq: int, events: list[KVEvent]) -> None:
        """Take a message that was requested; unknown older ones are lost."""
        if seq > self._next:
            self.lose()
        if seq >= self._next:
            self._apply(seq, events)

    def skip_to(self, seq: int) -> None:
        """Messages before `seq` cannot be had: drop everything and expect `seq`."""
        if seq > self._next:
            self.lose()
            self._next = seq

    def lose(self) -> None:
        self._clear()
        self.whole = False
        self.num_gaps += 1

    def _clear(self) -> None:
        self._index.forget(self._worker_id)
        self._blocks.clear()
        self.num_tokens = 0

    def _apply(self, seq: int, events: list[KVEvent]) -> None:
        self._next = seq + 1
        removed = False
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved(block_hashes=hashes):
                    removed = True
                    for block_hash in hashes:
                        self._remove(block_hash)
                case AllBlocksCleared():
                    self._clear()
                    self.whole = True
        if removed and self.whole:  # text that we sent there is a guess: no more of it than fits
            self._index.shrink(self._worker_id, -(-self.num_tokens // BLOCK_TOKENS))

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        if size < 1 or len(event.token_ids) != size * len(event.block_hashes):
            return
        before = self._before(event)
        for i, block_hash in enumerate(event.block_hashes):
            if len(self._blocks) >= MAX_BLOCKS:
                return
            known = self._blocks.get(block_hash)
            if known is None:
                before = self._blocks[block_hash] = _next(before, event.token_ids[i * size : (i + 1) * size])
                self.num_tokens += size
            else:
                before = known
            for key in before.keys:
                self._index.store(self._worker_id, key)

    def _before(self, event: BlockStored) -> _Block:
        """The block that the event continues; an unknown one for KV of an adapter: requests may name it otherwise."""
        if event.lora_id is not None or event.lora_name is not None:
            return _Block(0)
        if event.parent_block_hash is None:
            return _Block(0, open_chain(token_seed(namespace=_namespace(event))))
        return self._blocks.get(event.parent_block_hash) or _Block(0)

    def _remove(self, block_hash: BlockHash) -> None:
        block = self._blocks.pop(block_hash, None)
        if block is not None:
            self.num_tokens -= block.size
            for key in block.keys:
                self._index.remove(self._worker_id, key)


def _namespace(event: BlockStored) -> list[str]:
    """The extra keys of the first block, as text: what is no namespace is in no request, either."""
    keys = event.extra_keys
    first = keys[0] if isinstance(keys, list) and keys else None
    return [str(key) for key in first] if isinstance(first, list) else []


def _next(before: _Block, tokens: list[int]) -> _Block:
    running, keys = before.running, []
    if running is None:
        return _Block(len(tokens))
    try:
        rest = before.rest + token_bytes(tokens)
    except OverflowError:
        return _Block(len(tokens))
    while len(rest) >= BLOCK_BYTES:
        running = running.copy()
        running.update(rest[:BLOCK_BYTES])
        keys.append(running.digest())
        rest = rest[BLOCK_BYTES:]
    return _Block(len(tokens), running, rest, tuple(keys))
