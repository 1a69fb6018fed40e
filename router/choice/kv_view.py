"""One worker's prefix cache by its KV events, entered into the prefix index. Pure.

Workers name blocks of their page size by hashes of their own; the index knows prefixes by keys of ours, one each
BLOCK_TOKENS tokens. So each block is kept with the hash that runs over its prompt up to there (router/choice/prefix_keys.py)
and the tokens that did not fill one of our blocks yet.

Numbers of messages show what was lost. `on_message` says from where on messages are missing; whoever reads the sockets
asks the worker for them (`on_replay`), or gives up what is known (`lose`).
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
    """`running`: the hash over all whole blocks of ours so far, None where the start of the prompt is unknown.

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
        self._num_tokens = 0
        self.whole = True
        self.num_gaps = 0

    def on_message(self, seq: int, events: list[KVEvent]) -> int | None:
        """A published message. None: all have come; else the number from which on messages are missing, this one included."""
        if seq <= self._last_live:
            self._start_anew()  # its numbers only grow: another life of the worker
        if seq > self._next:
            return self._next
        self._last_live = seq
        if seq == self._next:
            self._apply(seq, events)
        return None

    def on_replay(self, seq: int, events: list[KVEvent]) -> None:
        """A message that was asked for. What is older than it and unknown is lost for ever."""
        if seq > self._next:
            self.lose()
        if seq >= self._next:
            self._apply(seq, events)

    def skip_to(self, seq: int) -> None:
        """What is missing before `seq` cannot be had: all knowledge is lost, the next message is expected to be `seq`."""
        if seq > self._next:
            self.lose()
            self._next = seq

    def lose(self) -> None:
        """Something happened that we do not know: what we know may be wrong."""
        self._clear()
        self.whole = False
        self.num_gaps += 1

    @property
    def num_tokens(self) -> int:
        """Tokens in the worker's cache, by its events."""
        return self._num_tokens

    # ---- inside

    def _start_anew(self) -> None:
        self._clear()
        self._next, self._last_live, self.whole = 0, -1, True

    def _clear(self) -> None:
        self._index.forget(self._worker_id)
        self._blocks.clear()
        self._num_tokens = 0

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
        if removed and self.whole:  # text that we sent there is known by guess alone: no more of it than there is room
            self._index.shrink(self._worker_id, -(-self._num_tokens // BLOCK_TOKENS))

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
                self._num_tokens += size
            else:
                before = known
            for key in before.keys:
                self._index.store(self._worker_id, key)

    def _before(self, event: BlockStored) -> _Block:
        """Where the event goes on. KV of an adapter is nobody else's, and we do not know how requests name it."""
        if event.lora_id is not None:
            return _Block(0)
        if event.parent_block_hash is None:
            return _Block(0, open_chain(token_seed()))
        return self._blocks.get(event.parent_block_hash) or _Block(0)

    def _remove(self, block_hash: BlockHash) -> None:
        block = self._blocks.pop(block_hash, None)
        if block is not None:
            self._num_tokens -= block.size
            for key in block.keys:
                self._index.remove(self._worker_id, key)


def _next(before: _Block, tokens: list[int]) -> _Block:
    """The block with `tokens` behind `before`."""
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
