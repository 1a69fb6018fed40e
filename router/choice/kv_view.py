"""One worker's prefix cache by its KV events. Pure.

After a gap (`on_message`) its reader requests the messages (`on_replay`) or drops the view
(`lose`).
"""

from collections.abc import Sequence

from router.choice.prefix_index import PrefixIndex
from router.choice.token_blocks import TokenBlocks
from service.kv_events import AllBlocksCleared, AnyEvent, BlockRemoved, BlockStored, NamesRemoved, NamesStored
from service.prefix_chain import BLOCK_TOKENS, block_names


class WorkerCacheView:
    """One worker's cache. `whole`: all events are known. `named`: hashes are our keys."""

    def __init__(self, index: PrefixIndex, worker_id: int, *, named: bool = False) -> None:
        self._index = index
        self._worker_id = worker_id
        self._blocks: NamedBlocks | TokenBlocks = (NamedBlocks if named else TokenBlocks)(index, worker_id)
        self.next = 0  # number of the first unknown message
        self._last_live = -1
        self.whole = True
        self.num_gaps = 0
        self.num_messages = 0  # applied

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
        """Drop everything and expect `seq`."""
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
        self.num_messages += 1
        removed = False
        for event in events:
            match event:
                case BlockStored() | NamesStored():
                    self._blocks.store(event)
                case BlockRemoved() | NamesRemoved():
                    removed = True
                    self._blocks.remove(event)
                case AllBlocksCleared():
                    self._clear()
                    self.whole = True
        if removed and self.whole:  # prompts sent there are only presumed cached: at most as many as fit
            self._index.shrink(self._worker_id, -(-self._blocks.num_tokens // BLOCK_TOKENS))


class NamedBlocks:
    """Blocks of a worker whose hashes are our keys (service/prefix_chain.py)."""

    def __init__(self, index: PrefixIndex, worker_id: int) -> None:
        self._index = index
        self._worker_id = worker_id
        self._size = 0
        self.num_tokens = 0

    def store(self, event: BlockStored | NamesStored) -> None:
        """Add blocks, except of adapters, which requests may name otherwise."""
        assert isinstance(event, NamesStored)
        self._size = event.block_size
        self.num_tokens += self._size * len(event.block_hashes)
        if event.lora_id is None and event.lora_name is None:
            self._index.store_all(self._worker_id, block_names(event.block_hashes, self._size))

    def remove(self, event: BlockRemoved | NamesRemoved) -> None:
        assert isinstance(event, NamesRemoved)
        self.num_tokens = max(0, self.num_tokens - self._size * len(event.block_hashes))
        self._index.remove_all(self._worker_id, event.block_hashes)

    def clear(self) -> None:
        self.num_tokens = 0
