"""A rank's transfer engine and its memory, as flags and pool say. Each rank of a worker has its own."""

import hashlib

from disagg.config import SchedulerSpec
from engine.kv.held import HeldKV
from engine.kv.kv_pool import KVPool
from engine.kv.state_pool import StatePool
from transfer_backends.contract import RankMemory, Region, SidePool
from transfer_backends.engines.registry import make_engine
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
        fake_delay_s=disagg.fake_transfer_delay_s,
        fake_failure_rate=disagg.fake_transfer_failure_rate,
        seed=spec.engine.random_seed or 0,
    )


def memory_of(pool: KVPool, held: HeldKV | None) -> RankMemory:
    """One item per unit of each page. `held`: None: all units, each a piece that no layer divides."""
    region = Region(pool.base_ptr, (1 + pool.num_pages) * pool.units, pool.unit_bytes, _device(pool))
    if held is None:
        return RankMemory(region, 0, pool.units, 0, 1)
    return RankMemory(region, held.units.start, len(held.units), held.layers.start, len(held.layers))


def pools_of(states: StatePool | None, windows: KVPool | None) -> tuple[SidePool, ...]:
    """What a request has beside pages (`Memory.tail`). Workers exchange items of one layout alone, which the kind names."""
    pools = list[SidePool]()
    if states is not None:
        layout = "+".join(f"{spec.conv}{spec.dtype}/{spec.recurrent}" for spec in states.specs)
        kind = f"recurrent state {hashlib.sha256(layout.encode()).hexdigest()[:16]}"
        pools.append(SidePool(kind, Region(states.base_ptr, 1 + states.num_slots, states.slot_bytes, _device(states))))
    if windows is not None:
        layers = "+".join(f"{spec.num_kv_heads}x{spec.head_dim}:{spec.dtype}/{spec.window}" for spec in windows.specs)
        kind = f"pages of {len(windows.specs)} layers with a window {hashlib.sha256(layers.encode()).hexdigest()[:16]}"
        region = Region(windows.base_ptr, 1 + windows.num_pages, windows.page_bytes, _device(windows))
        pools.append(SidePool(kind, region))
    return tuple(pools)


def _device(pool: KVPool | StatePool) -> int | None:
    return pool.device.index or 0 if pool.device.type == "cuda" else None
