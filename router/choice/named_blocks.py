"""The blocks of a worker that uses our own keys as hashes (service/prefix_chain.py): they enter the prefix index as they are. Pure."""

from router.choice.prefix_index import PrefixIndex
from service.kv_events import BlockRemoved, BlockStored, NamesRemoved, NamesStored
from service.prefix_chain import block_names


class NamedBlocks:
    """`num_tokens`: what came and did not go; exact while no event is missing."""

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
