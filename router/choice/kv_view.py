"""One worker's prefix cache by its KV events, entered into the prefix index. Pure.

Messages are numbered. `on_message` returns from where on they are missing; the reader of the sockets requests them (`on_replay`)
or drops the view (`lose`).
"""

from collections.abc import Sequence

from router.choice.prefix_index import PrefixIndex
from router.choice.token_blocks import TokenBlocks
from service.kv_events import AllBlocksCleared, AnyEvent, BlockRemoved, BlockStored, NamesRemoved, NamesStored
from service.prefix_chain import BLOCK_TOKENS, block_names


class WorkerCacheView:
    """`whole`: every event since the worker's cache was empty is known. `named`: the worker's hashes are our keys (NamesStored)."""

    def __init__(self, index: PrefixIndex, worker_id: int, *, named: bool = False) -> None:
        self._index = index
        self._worker_id = worker_id
        self._blocks: NamedBlocks | TokenBlocks = (NamedBlocks if named else TokenBlocks)(index, worker_id)
        self.next = 0  # number of the first message that is not known
        self._last_live = -1
        self.whole = True
        self.num_gaps = 0
        self.num_messages = 0  # applied

    @property
    def num_tokens(self) -> int:
        return self._blocks.num_tokens

    def on_message(self, seq: int, events: Sequence[AnyEvent]) -> int | None:
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

    def on_replay(self, seq: int, events: Sequence[AnyEvent]) -> None:
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
        if removed and self.whole:  # text that we sent there is a guess: no more of it than fits
            self._index.shrink(self._worker_id, -(-self._blocks.num_tokens // BLOCK_TOKENS))


class NamedBlocks:
    """The blocks of a worker that uses our own keys as hashes (service/prefix_chain.py).

    They enter the index as they are. `num_tokens`: what came and did not go; exact while no event is missing.
    """

    def __init__(self, index: PrefixIndex, worker_id: int) -> None:
        self._index = index
        self._worker_id = worker_id
        self._size = 0
        self.num_tokens = 0

    def store(self, event: BlockStored | NamesStored) -> None:
        """Take new blocks. Those of an adapter are in no index: requests may name it otherwise."""
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
