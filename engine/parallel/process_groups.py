"""Process groups of GPU ranks on one machine. NCCL never joined GPUs here; gloo tests the code.

Ranks meet in an unnamed memory file that they inherit: no port, no stranger. NCCL's sockets stay on
loopback.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from engine.kernels.build import RANKS_ENDED, failure
from engine.parallel.collectives import columns_of, tree_sum
from engine.parallel.layout import Place
from service.flags import ConfigError

log = logging.getLogger(__name__)

SMALL_NUMBERS = 1 << 18  # 1 MiB of float32


class SymmetricMemory:
    """Torch's symmetric memory. All ranks make theirs before they `meet`; both raise anything."""

    def __init__(self, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory

        self._own = _symmetric_memory.empty(SMALL_NUMBERS, dtype=torch.float32, device=device)
        self._map = _symmetric_memory.rendezvous

    def meet(self, group: dist.ProcessGroup) -> None:
        """Map the memory of all ranks, and read in each what its rank wrote."""
        self._handle = self._map(self._own, group)
        ranks = range(group.size())
        # [SMALL_NUMBERS] each, by rank
        self.peers = [self._handle.get_buffer(rank, [SMALL_NUMBERS], torch.float32) for rank in ranks]
        self.peers[group.rank()].fill_(group.rank())
        self.barrier()
        seen = [int(peer[-1]) for peer in self.peers]
        self.barrier()
        if seen != list(ranks):
            raise RuntimeError(f"the memory of ranks {list(ranks)} is mapped, and holds what {seen} wrote")

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
        flat = _flat(partial)
        small = self._memory is not None and len(flat) <= SMALL_NUMBERS
        return (self._sum_small(flat, dtype, range(len(flat))) if small else self._sum_slices(flat, dtype)).view(
            partial.shape
        )

    def gather_columns(self, part: Tensor, *, columns: range, total: int) -> Tensor | None:
        """Columns must be those of `columns_of`."""
        mine = columns_of(self.rank, self.size, total)
        assert columns == mine, (columns, mine)
        widest = -(-total // self.size)
        padded = torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        with _ending():
            self._group.gather([parts] if parts else [], [padded], options).wait()
        if self.rank:
            return None
        return torch.cat([x[:, : len(columns_of(r, self.size, total))] for r, x in enumerate(parts)], 1)

    def share(self, x: Tensor, *, owner: int = 0) -> None:
        with _ending():
            self._group.broadcast(x, owner).wait()

    def sum_pieces(self, partial: Tensor, lengths: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """This rank's piece of the flat sum, cut into `lengths` by rank."""
        flat, first, length = _flat(partial), sum(lengths[: self.rank]), lengths[self.rank]
        if self._memory is not None and len(flat) <= SMALL_NUMBERS:
            return self._sum_small(flat, dtype, range(first, first + length))
        pieces = self.to_all(flat, lengths, [length] * self.size)
        return tree_sum(list(pieces.view(self.size, length))).to(dtype)

    def join_pieces(self, piece: Tensor, *, total: int) -> Tensor:
        """[total] of all ranks' dense pieces, whose lengths are those of `columns_of`."""
        widest = -(-total // self.size)
        parts = self.from_all(torch.nn.functional.pad(piece, (0, widest - len(piece)))).view(self.size, widest)
        if total % self.size == 0:
            return parts.view(-1)
        return torch.cat([part[: len(columns_of(r, self.size, total))] for r, part in enumerate(parts)])

    def to_all(self, parts: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Each rank's part for this one, in order of ranks. `sent`, `received`: rows by rank."""
        out = parts.new_empty((sum(received), *parts.shape[1:]))
        with _ending():
            self._group.alltoall_base(out, parts.contiguous(), list(received), list(sent)).wait()
        return out

    def from_all(self, part: Tensor) -> Tensor:
        """Dense `part`s [n, ...] of all ranks after one another, equally long."""
        out = part.new_empty((self.size * len(part), *part.shape[1:]))
        with _ending():
            self._group._allgather_base(out, part.contiguous()).wait()
        return out

    def close(self) -> None: ...

    def _sum_small(self, flat: Tensor, dtype: torch.dtype, piece: range) -> Tensor:
        assert self._memory is not None
        self._memory.peers[self.rank][: len(flat)].copy_(flat)
        self._memory.barrier()
        total = tree_sum([peer[piece.start : piece.stop] for peer in self._memory.peers]).to(dtype)
        self._memory.barrier()  # all have read: the next sum may write
        return total

    def _sum_slices(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        slice_len = -(-len(flat) // self.size)
        padded = torch.nn.functional.pad(flat, (0, slice_len * self.size - len(flat)))
        slices = self.to_all(padded, [slice_len] * self.size, [slice_len] * self.size)
        mine = tree_sum(list(slices.view(self.size, slice_len))).to(dtype)
        return self.from_all(mine)[: len(flat)]


GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


@contextmanager
def _ending() -> Iterator[None]:
    """Raise RanksEnded where the backend says that a rank has ended; NCCL may wait instead."""
    try:
        yield
    except RuntimeError as error:
        if not any(text in str(error) for text in GONE):
            raise
        raise failure(RANKS_ENDED) from error


def _flat(partial: Tensor) -> Tensor:
    assert partial.dtype == torch.float32 and partial.is_contiguous(), (partial.dtype, partial.stride())
    return partial.view(-1)


SHM = "/dev/shm"
LOOK_S = 0.02  # between checks for other ranks
MAP_S = 30.0  # for mapping memory of peers, in which a rank may fail before the others
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
class JointGroups:
    """All ranks of DP attention, and of each DP rank the one with this rank's heads."""

    ranks: dist.ProcessGroup
    memory: SymmetricMemory | None
    across: dist.ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """`stage` is None for a single TP rank, `memory` without peer access.

    `before` and `after` pair it with neighbouring stages.
    """

    stage: dist.ProcessGroup | None
    memory: SymmetricMemory | None
    before: dist.ProcessGroup | None
    after: dist.ProcessGroup | None
    joint: JointGroups | None = None


def joined(store: int, place: Place, device: torch.device, *, timeout_s: float, backend: str = "nccl") -> RankGroups:
    """Meet the other ranks, once per process. Raises ConfigError.

    `backend` gloo: on CPUs, or two ranks on one GPU.
    """
    by_nccl = backend == "nccl"
    if by_nccl and not dist.is_nccl_available():
        raise ConfigError(
            f"--tp-size {place.tp_size}, --pp-size {place.pp_size}: this torch has no NCCL, which ranks on GPUs need"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    rank, size = _first(place) + place.rank, place.dp_size * place.tp_size * place.pp_size
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

    def memory_of(group: dist.ProcessGroup | None, name: str) -> SymmetricMemory | None:
        return _shared_memory(group, device, PrefixStore(name, file), rank) if group is not None and by_nccl else None

    stage = mine.get(_stage(place, place.dp_rank, place.pp_rank)) if place.tp_size > 1 else None
    memory, joint = memory_of(stage, "memory"), None
    if place.dp_size > 1:
        every, across = mine[_all(place)], mine[_across(place, place.tp_rank)]
        joint = JointGroups(ranks=every, memory=memory_of(every, "joint memory"), across=across)
    return RankGroups(
        stage=stage,
        memory=memory,
        before=mine.get((rank - place.tp_size, rank)) if place.pp_rank else None,
        after=mine.get((rank, rank + place.tp_size)) if not place.is_last_stage else None,
        joint=joint,
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


def members(place: Place) -> list[tuple[int, ...]]:
    """Ranks of each group, counted over DP ranks."""
    size = place.tp_size
    stages = [_stage(place, dp, stage) for dp in range(place.dp_size) for stage in range(place.pp_size)]
    joint = [_all(place), *(_across(place, rank) for rank in range(size))] if place.dp_size > 1 else []
    links = [(rank, rank + size) for rank in range(size * (place.pp_size - 1))]
    return list(dict.fromkeys([*(stages if size > 1 else []), *joint, *links]))


def _first(place: Place) -> int:
    return place.dp_rank * place.tp_size * place.pp_size


def _stage(place: Place, dp_rank: int, stage: int) -> tuple[int, ...]:
    first = (dp_rank * place.pp_size + stage) * place.tp_size
    return tuple(range(first, first + place.tp_size))


def _all(place: Place) -> tuple[int, ...]:
    return tuple(range(place.mlp_size))


def _across(place: Place, tp_rank: int) -> tuple[int, ...]:
    return tuple(range(tp_rank, place.mlp_size, place.tp_size))


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
    """None where a rank has none. No rank waits in `meet` for one that has failed before."""
    ranks, failed = dist.get_process_group_ranks(stage), ""

    def agreed(step: str) -> bool:
        votes.set(f"{step} {rank}", failed)
        answers = {other: votes.get(f"{step} {other}").decode() for other in ranks}
        for other, why in answers.items():
            if why:
                log.warning("rank %d: small sums take NCCL's messages, too: rank %d %s", rank, other, why)
        return not any(answers.values())

    patience = votes.timeout  # type: ignore[attr-defined]  # torch has it
    try:
        memory = SymmetricMemory(device)
    except Exception as error:
        failed = f"has no symmetric memory ({_first_line(error)})"
    if not agreed("allocates"):
        return None
    votes.set_timeout(timedelta(seconds=MAP_S))  # of the file, by which torch's ranks meet
    try:
        memory.meet(stage)
    except Exception as error:
        failed = f"maps no memory of its peers ({_first_line(error)})"
    finally:
        votes.set_timeout(patience)
    return memory if agreed("maps") else None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
