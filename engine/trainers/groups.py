"""Process groups of trainers, which broadcast weights to the ranks of workers.

A group is the one of SGLang's `init_custom_process_group` with the same arguments: a TCP store of
rank 0, keys below the group's name, one backend. Ranks join in threads, besides steps.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, Store, TCPStore

from engine.messages import JoinTrainer, NewTensors
from engine.ranks.followers import OnAllRanks
from service.flags import ConfigError

SOURCE = 0  # the trainer's rank
BACKENDS = {"gloo": "cpu", "nccl": "cuda"}  # name -> first device of the group, part of its keys
LOOK_S = 0.001  # between looks at a broadcast of NCCL
NEVER = timedelta(days=1)
REMEDY = "POST /destroy_weights_update_group, and open another"


class TrainerGroup(Protocol):
    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return what the trainer broadcasts next, on the host. Raises RuntimeError."""


class TrainerGroups:
    """Groups of rank `rank` of `num_ranks`, by name. `timeout_s`: of a join and of each tensor.

    `refusal`: why it joins none. Raises ConfigError; a group that failed is left.
    """

    def __init__(self, *, rank: int, num_ranks: int, timeout_s: float, refusal: str = "") -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._timeout_s = timeout_s
        self._refusal = refusal
        self._groups: dict[str, TrainerGroup] = {}

    def check_closed(self, name: str) -> None:
        if self._refusal:
            raise ConfigError(self._refusal)
        if name in self._groups:
            raise ConfigError(f"group_name: {name!r} is open already; {REMEDY}")

    def check_open(self, name: str) -> None:
        if name not in self._groups:
            raise ConfigError(f"group_name: no group {name!r} is open; POST /init_weights_update_group opens one")

    def join(self, asked: JoinTrainer) -> None:
        self.check_closed(asked.name)
        rank = asked.rank_offset + asked.dp_rank * self._num_ranks + self._rank
        if rank >= asked.world_size:
            raise ConfigError(
                f"rank_offset: {asked.rank_offset} makes this worker's rank {self._rank} rank {rank} of "
                f"{asked.world_size}; world_size must count the trainer and all ranks of all workers"
            )
        try:
            self._groups[asked.name] = joined(asked, rank, self._timeout_s)
        except RuntimeError as error:
            raise ConfigError(
                f"master_address: rank {rank} of {asked.world_size} cannot join {asked.name!r} at "
                f"{asked.host}:{asked.port} within {self._timeout_s:g} s (--dist-timeout): {_first_line(error)}"
            ) from None

    def leave(self, name: str) -> None:
        self.check_open(name)
        del self._groups[name]

    def receive(self, tensors: NewTensors, *, keeps: bool = True) -> dict[str, Tensor]:
        """Receive all tensors; without `keeps` return none, because another rank keeps them."""
        self.check_open(tensors.group)
        group, found = self._groups[tensors.group], {}
        for name, dtype, shape in zip(tensors.names, tensors.dtypes, tensors.shapes, strict=True):
            try:
                tensor = group.receive(shape, getattr(torch, dtype))
            except RuntimeError as error:
                self._groups.pop(tensors.group, None)  # its members no longer agree on what comes next
                raise ConfigError(
                    f"group_name: {tensors.group!r} broke at tensor {name}, after {self._timeout_s:g} s at most "
                    f"(--dist-timeout), and was left; nothing has changed: {_first_line(error)}"
                ) from None
            if keeps:
                found[name] = tensor
        return found


class GroupTrainers(OnAllRanks[TrainerGroups]):
    """`TrainerGroups` of a leader, `own`, with its followers."""

    def join(self, asked: JoinTrainer) -> None:
        self._own.check_closed(asked.name)
        self._on_all("join_trainer", asked.name, lambda: self._own.join(asked), asked=msgspec.to_builtins(asked))

    def leave(self, name: str) -> None:
        self._own.leave(name)
        self._followers.apply("leave_trainer", group=name).wait()

    def receive(self, tensors: NewTensors) -> dict[str, Tensor]:
        self._own.check_open(tensors.group)
        found: dict[str, Tensor] = {}

        def receive() -> None:
            found.update(self._own.receive(tensors))

        self._on_all("receive_tensors", tensors.group, receive, tensors=msgspec.to_builtins(tensors))
        return found

    def _on_all(self, name: str, group: str, own: Callable[[], None], **args: object) -> None:
        """Run reader `name` on followers, and `own`; its error comes first, and ends the group."""
        try:
            self._prepare(name, own, **args)
        except ConfigError:
            self._leave_quietly(group)
            raise

    def _prepare(self, name: str, own: Callable[[], None], **args: object) -> None:
        prepared = self._followers.prepare(name, **args)
        try:
            try:
                own()
            except ConfigError:
                with suppress(ConfigError):
                    prepared.wait()
                raise
            prepared.wait()
        finally:
            self._followers.apply("forget", number=prepared.number).wait()

    def _leave_quietly(self, name: str) -> None:
        with suppress(ConfigError):
            self._own.leave(name)
        with suppress(ConfigError):
            self._followers.apply("leave_trainer", group=name).wait()


def follower_readers(groups: TrainerGroups) -> dict[str, Callable[..., None]]:
    """Return what followers do in threads for `GroupTrainers`, by name."""
    return {
        "join_trainer": lambda asked: groups.join(msgspec.convert(asked, JoinTrainer)),
        "receive_tensors": lambda tensors: _drop(groups.receive(msgspec.convert(tensors, NewTensors), keeps=False)),
    }


def _drop(received: dict[str, Tensor]) -> None:
    """The leader keeps the tensors, in memory that all ranks of its machine map."""
    assert not received


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def joined(asked: JoinTrainer, rank: int, timeout_s: float) -> TrainerGroup:
    """Raises RuntimeError."""
    timeout = timedelta(seconds=timeout_s)
    store: Store = TCPStore(asked.host, asked.port, asked.world_size, is_master=False, timeout=timeout)
    for prefix in (asked.name, f"{asked.name}/", f"{BACKENDS[asked.backend]}/"):
        store = PrefixStore(prefix, store)
    if asked.backend == "nccl":
        return NcclGroup(store, rank, asked.world_size, timeout_s)
    return GlooGroup(store, rank, asked.world_size, timeout)


class GlooGroup:
    """`timeout`: of the meeting, and of each tensor."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._group: dist.ProcessGroup = dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[assignment]

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self._group.broadcast([tensor], _from_trainer()).wait()
        return tensor


class NcclGroup:
    """A group of GPUs. It was never run: NCCL needs two.

    Torch would end the process after a timeout.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        if not dist.is_nccl_available() or not torch.cuda.is_available():
            raise RuntimeError("backend nccl needs a GPU and a torch with NCCL; take gloo")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = NEVER
        self._group: dist.ProcessGroup = dist.ProcessGroupNCCL(store, rank, size, options)  # type: ignore[assignment]
        self._timeout_s = timeout_s

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device="cuda")
        self._await(self._group.broadcast([tensor], _from_trainer()))
        return tensor.cpu()

    def _await(self, work: dist.Work) -> None:
        until_s = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if time.monotonic() > until_s:
                self._group.abort()
                raise RuntimeError("the trainer sent nothing")
            time.sleep(LOOK_S)
        work.wait()


def _from_trainer() -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = SOURCE, 0
    return options
