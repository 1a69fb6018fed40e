"""Process groups of GPU ranks on one machine. NCCL never joined GPUs here; gloo tests the code.

Ranks meet in an unnamed memory file that they inherit: no port, no stranger. NCCL's sockets stay on
loopback.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from engine.parallel.collectives import columns_of, tree_sum
from engine.parallel.layout import Place
from service.flags import ConfigError

SMALL_NUMBERS = 1 << 18  # 1 MiB of float32


class SymmetricMemory:
    """Torch's symmetric memory. Raises RuntimeError without peer access."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory

        own = _symmetric_memory.empty(SMALL_NUMBERS, dtype=torch.float32, device=device)
        self._handle = _symmetric_memory.rendezvous(own, group)
        ranks = range(group.size())
        # [SMALL_NUMBERS] each, by rank
        self.peers = [self._handle.get_buffer(rank, [SMALL_NUMBERS], torch.float32) for rank in ranks]

    def barrier(self) -> None:
        """Order all ranks' earlier writes and reads, in the stream."""
        self._handle.barrier()


class NcclCollectives:
    """`Collectives` of GPUs; order and arithmetic are tested over gloo.

    NCCL moves bytes; torch adds in `tree_sum`'s order, for any batch and message size. The leader
    ends a stuck call by killing ranks.

      small   partials in symmetric memory, read by all ranks: about as fast as a kernel launch
      large   each rank adds its slice of all partials, then all gather

    Graphs may record all calls: none syncs with the host.
    """

    def __init__(self, group: dist.ProcessGroup, *, memory: SymmetricMemory | None) -> None:
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

    def close(self) -> None: ...

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


SHM = "/dev/shm"
LOOK_S = 0.02  # between checks for other ranks
ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    # The leader's watchdog ends a hanging group, and names a rank.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Each process has its GPU as number 0, which torch takes for one shared GPU. Torch then omits
    # multicast, whose sums have no fixed order.
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """`stage` is None for a single TP rank, `memory` without peer access.

    `before` and `after` pair it with neighbouring stages.
    """

    stage: dist.ProcessGroup | None
    memory: SymmetricMemory | None
    before: dist.ProcessGroup | None
    after: dist.ProcessGroup | None


def new_store() -> int:
    """Descriptor of the rendezvous file, which ranks inherit and keep open."""
    return os.memfd_create("tandem-store")


def joined(store: int, place: Place, device: torch.device, *, timeout_s: float, backend: str = "nccl") -> RankGroups:
    """Meet the other ranks, once per process. Raises ConfigError.

    `backend` gloo works on CPUs, or on one GPU for two ranks, which NCCL refuses.
    """
    by_nccl = backend == "nccl"
    if by_nccl and not dist.is_nccl_available():
        raise ConfigError(
            f"--tp-size {place.tp_size}, --pp-size {place.pp_size}: this torch has no NCCL, which ranks on GPUs need"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    rank, size = place.pp_rank * place.tp_size + place.tp_rank, place.tp_size * place.pp_size
    file = FileStore(f"/proc/self/fd/{store}", size)
    _await_all(file, rank, size, timeout_s)
    mine: dict[tuple[int, ...], dist.ProcessGroup] = {}
    with _naming_a_small_shm():
        dist.init_process_group(
            backend,
            store=file,
            rank=rank,
            world_size=size,
            device_id=device if by_nccl else None,
            timeout=timedelta(seconds=timeout_s),
        )
        for ranks in members(place):  # every rank makes every group, in one order
            group = dist.group.WORLD if len(ranks) == size else dist.new_group(list(ranks))
            if rank in ranks and group is not None:
                mine[ranks] = group
    stage = mine.get(_stage(place, place.pp_rank)) if place.tp_size > 1 else None
    memory = None if stage is None or not by_nccl else _shared_memory(stage, device, PrefixStore("memory", file), rank)
    return RankGroups(
        stage=stage,
        memory=memory,
        before=mine.get((rank - place.tp_size, rank)),
        after=mine.get((rank, rank + place.tp_size)),
    )


@contextmanager
def _naming_a_small_shm() -> Iterator[None]:
    """Add the remedy to NCCL's error: containers have 64 MB of /dev/shm."""
    try:
        yield
    except RuntimeError as error:
        if SHM not in str(error):
            raise
        free = os.statvfs(SHM)
        raise ConfigError(
            f"{SHM}: NCCL, which joins the ranks, needs more room than the {free.f_bavail * free.f_frsize >> 20} MiB free there; start the "
            "container with --shm-size 1g (Kubernetes: an emptyDir of medium Memory)"
        ) from error


def _stage(place: Place, stage: int) -> tuple[int, ...]:
    return tuple(range(stage * place.tp_size, (stage + 1) * place.tp_size))


def members(place: Place) -> list[tuple[int, ...]]:
    size = place.tp_size
    stages = [_stage(place, stage) for stage in range(place.pp_size)] if size > 1 else []
    return stages + [(rank, rank + size) for rank in range(size * (place.pp_size - 1))]


def _await_all(file: Store, rank: int, size: int, timeout_s: float) -> None:
    file.set(f"here {rank}", "")
    until_s = time.monotonic() + timeout_s
    while missing := [other for other in range(size) if not file.check([f"here {other}"])]:
        if time.monotonic() > until_s:
            names = "rank " + str(missing[0]) if len(missing) == 1 else "ranks " + ", ".join(map(str, missing))
            raise ConfigError(
                f"--dist-timeout: {names} of {size} did not meet rank {rank} within {timeout_s:.0f} s; look at the log, or "
                "raise it"
            )
        time.sleep(LOOK_S)


def _shared_memory(stage: dist.ProcessGroup, device: torch.device, votes: Store, rank: int) -> SymmetricMemory | None:
    try:
        memory = SymmetricMemory(stage, device)
    except RuntimeError:
        memory = None
    votes.set(str(rank), "no" if memory is None else "yes")
    ranks = dist.get_process_group_ranks(stage)
    return memory if all(votes.get(str(other)) == b"yes" for other in ranks) else None
