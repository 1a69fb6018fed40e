"""Requirements of a role, the memory of a rank's steps, recorded ones, its place among others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.core.mem_cache.backups import NOTHING, CopySize
from engine.executor.forward import FutureMap, StepInputs
from engine.executor.graphs import Capture
from engine.kv.host_pool import HostPool
from engine.kv.kv_pool import AllocateBytes, KVPool, zeroed_bytes
from engine.parallel.layout import ALONE, Place
from engine.parallel.row_exchange import RowExchange
from service.flags import ConfigError

MakeCapture = Callable[[], Capture]


@dataclass(frozen=True, slots=True)
class EngineUse:
    """The defaults fit a unified worker.

    `decodes`, `prefills`: record such steps. `peers_write_pages`: no host tier, which needs stream
    order. `kv_stays`: why KV memory cannot be released. `retracted_kv`: as
    --disaggregation-decode-retraction-backup. `reserve_floor`: as in Limits. `receives_features`:
    from encoder workers. `name`: of the rank, for files.
    """

    decodes: bool = True
    prefills: bool = True
    peers_write_pages: bool = False
    kv_stays: str = ""
    retracted_kv: str = "recompute"
    reserve_floor: int = 0
    allocate_kv: AllocateBytes = zeroed_bytes
    receives_features: bool = False
    name: str = "worker"


UNIFIED = EngineUse()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """The memory that steps read and write: KV in `pool`, of layers with a pool apart in `windows`.

    `max_pages`: of a request, if not as many as the pool has and the context needs. `shadows`: of
    how many requests with recurrent states a step may verify drafts. `arrivals`: as of ImagePass.
    `host_pool`: of the host tier. `backup_room`: for copies of retracted requests.
    """

    pool: KVPool
    max_pages: int | None = None
    windows: KVPool | None = None
    shadows: int = 0
    arrivals: KVPool | None = None
    host_pool: HostPool | None = None
    backup_room: CopySize = NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The steps that are recorded: `decodes`, `prefills`.

    They are CUDA graphs or (decode steps) tapes of C kernels. `capture`: records graphs in place of
    CUDA. `progress`: bars show how far recording has come.
    """

    decodes: bool = False
    prefills: bool = False
    capture: MakeCapture | None = None
    progress: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeat:
    """The place of this rank in the model, and what it shares with others.

    `exchange`: with DP attention. `future_map`: if not one of its own. `inputs`: of steps, if not
    the tokens of the future map.
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
