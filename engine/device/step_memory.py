"""The base of a rank: role, share of a GPU, machine, weights, memory of steps, place."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.config import EngineConfig
from engine.core.mem_cache.backups import NOTHING, CopySize
from engine.executor.graphs import Capture
from engine.executor.step_part import FutureMap, StepInputs
from engine.kv.host_memory import HERE, HostMemory
from engine.kv.host_pool import HostPool, HostStates
from engine.kv.kv_pool import AllocateBytes, KVPool, zeroed_bytes
from engine.kv.state_pool import StatePool
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.models.load import Load, load_model
from engine.parallel.layout import ALONE, Place
from engine.parallel.row_exchange import RowExchange
from service.flags import ConfigError

MakeCapture = Callable[[], Capture]
WAIT_S = 30.0  # an ended process frees its memory a little later
ASK_EVERY_S = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineUse:
    """The defaults fit a unified worker.

    `peers_write_pages`: outside stream order. `pins_states`: for peers. `kv_stays`: why KV stays.
    `retracted_kv`: as --disaggregation-decode-retraction-backup. `reserve_floor`: as in Limits.
    `receives_features`: from encoder workers. `name`: of the rank, for files.
    """

    peers_write_pages: bool = False
    pins_states: bool = False
    kv_stays: str = ""
    retracted_kv: str = "recompute"
    reserve_floor: int = 0
    allocate_kv: AllocateBytes = zeroed_bytes
    receives_features: bool = False
    name: str = "worker"


UNIFIED = EngineUse()


# ---- A process's share of a GPU.


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f}"


class MemoryGauge(Protocol):
    def total(self) -> int: ...

    def free(self) -> int:
        """Bytes free for any process."""

    def own(self) -> int:
        """Bytes of this process."""

    def begin_peak(self) -> None: ...

    def peak(self) -> int:
        """This process's maximum since `begin_peak`."""

    def release(self) -> None:
        """Free torch's cache."""


def await_share(
    gauge: MemoryGauge,
    share: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait up to WAIT_S for this process's share. Raises ConfigError with others' usage.

    Workers on one GPU never race: each stays in its share (engine/device/memory_plan.py).
    """
    total, until_s = gauge.total(), clock() + WAIT_S
    asked = False
    while (ours := gauge.free() + gauge.own()) < int(share * total):
        if not asked:
            log.info(
                "GPU memory: others use %s of %s GiB; waiting up to %g s for it", gib(total - ours), gib(total), WAIT_S
            )
            asked = True
        if clock() >= until_s:
            raise ConfigError(_short(total, ours, share))
        sleep(ASK_EVERY_S)


def _short(total: int, ours: int, share: float) -> str:
    fits = int(max(0, ours) / total * 100) / 100
    return (
        f"--mem-fraction-static {share:g}: {gib(int(share * total))} of the GPU's {gib(total)} GiB are this worker's, and other "
        f"processes use {gib(total - ours)}; give each worker on this GPU its share (at most {fits:g} fits here now). If no "
        "process of that size runs (nvidia-smi), a peer still maps the memory of a worker that has ended: restart the peer"
    )


# ---- A rank's machine and weights, the memory of its steps, and its place.


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMachine:
    """The hardware of a rank, and the reader of its weights. CPU ranks share `host`.

    `capture` records graphs and `gauge` measures memory in place of CUDA. `decodes`, `prefills`:
    record such steps. `progress`: show bars.
    """

    capture: MakeCapture | None = None
    decodes: bool = True
    prefills: bool = True
    gauge: MemoryGauge | None = None
    host: HostMemory = HERE
    load: Load = load_model
    progress: bool = False


THIS_MACHINE = LocalMachine()


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank with its weights, whose fingerprint is `files` if taken. `config`: resolved.

    On a CPU `free` bytes were there before the weights, which take `weights`.
    """

    config: EngineConfig
    model_config: ModelConfig
    machine: LocalMachine
    model: DenseDecoder
    files: str
    free: int
    weights: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a recurrent state, 0 without recurrent layers."""
        specs = self.model.state_specs()
        return StatePool.slot_bytes_of(specs) if specs else 0

    @property
    def states(self) -> str:
        return str(self.model.state_specs() or "")

    @property
    def recurrent(self) -> bool:
        return self.slot_bytes > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Memory of steps: KV in `pool`, of layers with a pool apart in `windows`.

    `max_pages`: of a request, if not as many as the pool has and the context needs. `shadows`: of
    how many requests with states a step may verify drafts. `arrivals`: as of ImagePass.
    `host_pool`, `host_states`: of the host tier. `backup_room`: for copies of retracted requests.
    """

    pool: KVPool
    max_pages: int | None = None
    windows: KVPool | None = None
    shadows: int = 0
    arrivals: KVPool | None = None
    host_pool: HostPool | None = None
    host_states: HostStates | None = None
    backup_room: CopySize = NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Steps to record as CUDA graphs or (decode steps) tapes of C kernels.

    `capture`: records graphs in place of CUDA. `progress`: show bars.
    """

    decodes: bool = False
    prefills: bool = False
    capture: MakeCapture | None = None
    progress: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeat:
    """A rank's place, and what it has of others.

    `exchange`: with DP attention. `future_map`, `inputs` of steps: if not its own.
    """

    place: Place = ALONE
    exchange: RowExchange | None = None
    future_map: FutureMap | None = None
    inputs: StepInputs | None = None


@contextmanager
def memory_for_graphs() -> Iterator[None]:
    """Raises ConfigError where the block finds no memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--mem-fraction-static: no memory is left for the decode graphs ({error}); lower it or --cuda-graph-max-bs, "
            "or give --disable-cuda-graph"
        ) from error
