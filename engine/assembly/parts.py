"""The parts of an engine, as the roles and the loop of a worker take them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.core.mem_cache.cache_events import PrefixEvents
from engine.core.scheduler import Scheduler
from engine.device.device import Device
from engine.executor.executor import Executor
from engine.executor.warm_up import CompileLog
from engine.executor.weights import WeightUpdater
from engine.hicache.storage import PageStorage
from engine.kv.cache_spec import KVShard
from engine.kv.kv_pool import KVPool
from engine.loop.control import KVMemory
from engine.loop.trainer_control import Trainers
from engine.lora.bank import LoraStore
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.ranks.group import Group, GroupAdapters


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """Parts of an engine or an encoder. `config` is resolved. `memory`: bytes by use."""

    config: EngineConfig
    model: ModelConfig
    pool: KVPool
    kv: KVMemory
    scheduler: Scheduler
    trainers: Trainers
    depth: int
    memory: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts(WorkerParts):
    """A ready engine; `kv` and `adapters` are of all ranks, `device` and `memory` of the leader.

    `held`: the leader's part of the model's KV. `layers_in_pages`: its layers with KV in `pool`;
    others have a window, and a pool of their own. `behind_windows`: as of engine/device/pools.py.
    `compiles`: of a GPU; serves once the worker is ready. `storage`, `events`, `adapters`,
    `arrivals`: by --hicache-storage-backend, --kv-events-config, --enable-lora and for features of
    encoder workers.
    """

    device: Device
    adapters: LoraStore | GroupAdapters | None
    group: Group | None
    held: KVShard
    weights: WeightUpdater[DenseDecoder]
    storage: PageStorage | None
    events: PrefixEvents | None
    layers_in_pages: Sequence[int]
    behind_windows: str | None
    compiles: CompileLog | None
    arrivals: KVPool | None = None

    @property
    def executor(self) -> Executor:
        return self.device.executor
