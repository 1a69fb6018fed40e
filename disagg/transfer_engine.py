"""Transfer engine of a rank, its memory, KVArgs of managers; a role's requirements on an engine."""

import hashlib
from functools import partial

import torch

from disagg.config import DisaggConfig, SchedulerSpec, read_secret
from engine.device.step_memory import EngineUse
from engine.kv.kv_pool import KVPool, zeroed_bytes
from engine.kv.pool_memory import tensor_at
from engine.kv.state_pool import StatePool
from engine.ranks.rank_parts import RankPools
from transfer_backends.contract import Extent, RankMemory, Region, SideMemory, SidePool, TransferConfig
from transfer_backends.engines.cuda_context import CudaContext
from transfer_backends.engines.environment import devices_here
from transfer_backends.engines.mooncake import protocol_here
from transfer_backends.engines.mooncake_protocols import NEEDS_FABRIC
from transfer_backends.engines.registry import make_engine
from transfer_backends.engines.trial_memory import FabricMemory
from transfer_backends.ports import Engine


def engine_of(spec: SchedulerSpec, pool: KVPool) -> Engine:
    """Raises BackendUnavailable."""
    disagg = spec.disagg
    return make_engine(
        disagg.disaggregation_transfer_backend,
        host=spec.control_host,
        device=_device(pool),
        mooncake_protocol=disagg.disaggregation_mooncake_protocol,
        ib_device=disagg.disaggregation_ib_device,
    )


def memory_of(pools: RankPools) -> RankMemory:
    """One item per unit of a page."""
    pool, held = pools.kv, pools.held
    region = Region(pool.base_ptr, (1 + pool.num_pages) * pool.units, pool.unit_bytes, _device(pool))
    beside = list[SideMemory]()
    if pools.states is not None:
        beside.append(_parts_of_states(pools.states, held.state_layers))
    if pools.windows is not None:
        beside.append(_units_of_pages(pools.windows, held.units))
    layers = held.layers if pools.windows is None else range(max(1, len(pool.specs)))
    return RankMemory(region, held.units.start, len(held.units), layers.start, len(layers), pools=tuple(beside))


def _parts_of_states(states: StatePool, layers: range) -> SideMemory:
    region = Region(states.base_ptr, 1 + states.num_slots, states.slot_bytes, _device(states))
    return SideMemory(region, tuple(Extent(*run) for run in states.runs(layers)))


def _units_of_pages(windows: KVPool, units: range) -> SideMemory:
    region = Region(windows.base_ptr, 1 + windows.num_pages, windows.page_bytes, _device(windows))
    return SideMemory(region, (Extent(units.start * windows.unit_bytes, 0, windows.page_bytes),))


def side_pools(pools: RankPools) -> tuple[SidePool, ...]:
    """Extra states, in the order of `Memory.tail`."""
    found = list[SidePool]()
    if pools.states is not None:
        spec, num_layers = pools.states.specs[0], pools.held.num_state_layers
        part, head = spec.part, spec.recurrent[1:]
        layout = f"{part.num_channels}x{spec.conv[1]}{spec.dtype}/{part.num_heads}x{head}"
        found.append(
            SidePool(f"recurrent state of {num_layers} layers {_digest(layout)}", num_layers * spec.whole_bytes)
        )
    if (windows := pools.windows) is not None:
        layers = "+".join(
            f"{spec.num_kv_heads // windows.units}x{spec.head_dim}:{spec.dtype}/{spec.window}" for spec in windows.specs
        )
        kind = f"pages of {len(windows.specs)} layers with a window {_digest(layers)}"
        found.append(SidePool(kind, pools.held.num_units * windows.unit_bytes))
    return tuple(found)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _device(pool: KVPool | StatePool) -> int | None:
    return pool.device.index or 0 if pool.device.type == "cuda" else None


def transfer_config(spec: SchedulerSpec) -> TransferConfig:
    """Raises ConfigError."""
    return TransferConfig(
        control_host=spec.control_host,
        secret=read_secret(spec.disagg.cluster_secret_file),
    )


def engine_use(disagg: DisaggConfig, *, pp_size: int = 1, name: str = "worker") -> EngineUse:
    """`name`: of the rank, for files."""
    mode = disagg.disaggregation_mode
    decode = mode == "decode"
    return EngineUse(
        peers_write_pages=decode,
        pins_states=disagg.prefix_fetch,
        kv_stays=_why_kv_stays(disagg),
        retracted_kv=disagg.disaggregation_decode_retraction_backup if decode else "recompute",
        reserve_floor=0 if mode == "encode" else disagg.num_reserved_decode_tokens,
        allocate_kv=partial(kv_bytes, disagg),
        receives_features=disagg.feature_fetch and not decode and pp_size == 1,
        name=name,
    )


def _why_kv_stays(disagg: DisaggConfig) -> str:
    if not disagg.has_peers or not devices_here():
        return ""
    return "the KV memory of this worker is registered with RDMA devices, which keep its pages"


def kv_bytes(disagg: DisaggConfig, size_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate zeroed memory that the transfer engine can move, until the process ends.

    Mooncake's `nvlink` needs that of an NVLink fabric (never run). Raises BackendUnavailable.
    """
    if disagg.has_peers and disagg.disaggregation_transfer_backend == "mooncake":
        ordinal = device.index or 0 if device.type == "cuda" else None
        if protocol_here(disagg.disaggregation_mooncake_protocol, device=ordinal) == NEEDS_FABRIC:
            memory = FabricMemory(CudaContext(device.index or 0))
            return tensor_at(memory.allocate(size_bytes), size_bytes).zero_()
    return zeroed_bytes(size_bytes, device)
