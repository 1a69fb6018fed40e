"""Collectives of GPUs, never run on one: order and arithmetic are tested over gloo.

NCCL moves bytes; torch adds in `tree_sum`'s order, for any batch and message size.

  small   partials in symmetric memory, read by all ranks: about as fast as a kernel launch
  large   each rank adds its slice of all partials, then all gather

Graphs may record all calls: none syncs with the host.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.parallel.collectives import columns_of, tree_sum

SMALL_NUMBERS = 1 << 18  # 1 MiB of float32


class PeerMemory(Protocol):
    """Float32 buffers of all ranks, mutually readable."""

    peers: list[Tensor]  # [SMALL_NUMBERS] each, by rank

    def barrier(self) -> None:
        """Order all ranks' earlier writes and reads, in the stream."""
        ...


class SymmetricMemory:
    """Torch's symmetric memory. Raises RuntimeError without peer access."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory

        own = _symmetric_memory.empty(SMALL_NUMBERS, dtype=torch.float32, device=device)
        self._handle = _symmetric_memory.rendezvous(own, group)
        ranks = range(group.size())
        self.peers = [self._handle.get_buffer(rank, [SMALL_NUMBERS], torch.float32) for rank in ranks]

    def barrier(self) -> None:
        self._handle.barrier()


class NcclCollectives:
    """`Collectives` over a torch process group. The leader ends a stuck call by killing ranks."""

    def __init__(self, group: dist.ProcessGroup, *, memory: PeerMemory | None) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group = group
        self._memory = memory

    def sum(self, partial: Tensor, *, dtype: torch.dtype) -> Tensor:
        assert partial.dtype == torch.float32 and partial.is_contiguous(), (partial.dtype, partial.stride())
        flat = partial.view(-1)
        small = self._memory is not None and len(flat) <= SMALL_NUMBERS
        return (self._sum_small(flat, dtype) if small else self._sum_slices(flat, dtype)).view(partial.shape)

    def gather_columns(self, part: Tensor, *, columns: range, total: int) -> Tensor | None:
        """Columns must be those of `columns_of`."""
        mine = columns_of(self.rank, self.size, total)
        assert columns == mine, (columns, mine)
        widest = -(-total // self.size)
        padded = torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._group.gather([parts] if parts else [], [padded], options).wait()
        if self.rank:
            return None
        return torch.cat([x[:, : len(columns_of(r, self.size, total))] for r, x in enumerate(parts)], 1)

    def share(self, x: Tensor, *, owner: int = 0) -> None:
        self._group.broadcast(x, owner).wait()

    def close(self) -> None:
        """Do nothing: groups end with their processes."""

    def _sum_small(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        assert self._memory is not None
        self._memory.peers[self.rank][: len(flat)].copy_(flat)
        self._memory.barrier()
        total = tree_sum([peer[: len(flat)] for peer in self._memory.peers]).to(dtype)
        self._memory.barrier()  # all have read: the next sum may write
        return total

    def _sum_slices(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        slice_len = -(-len(flat) // self.size)
        padded = torch.nn.functional.pad(flat, (0, slice_len * self.size - len(flat)))
        slices = padded.new_empty((self.size, slice_len))
        self._group.alltoall_base(slices.view(-1), padded, [], []).wait()
        mine = tree_sum(list(slices)).to(dtype)
        whole = mine.new_empty(self.size * slice_len)
        self._group._allgather_base(whole, mine).wait()
        return whole[: len(flat)]
