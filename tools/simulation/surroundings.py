"""What surrounds a simulated worker and what it is built of: shared things, memory layout, scheduler, thread pools."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from disagg.metadata import ROW
from engine.assembly.core import CoreConfig, MemoryParts, build_core
from engine.core.estimates import RatioRule
from engine.core.mem_cache.backups import CopySize
from engine.core.mem_cache.host_cache import HostCache, TierRoom
from engine.core.mem_cache.image_cache import ImageCache
from engine.core.mem_cache.page_allocator import KVIdentity, PageAllocator
from engine.core.mem_cache.state_slots import StateSlots
from engine.core.mem_cache.window_pages import WindowPages
from engine.core.policy import NO_PRIORITIES, TAIL_SHARE, Limits, Priorities
from engine.core.scheduler import Scheduler
from engine.messages import KVSource
from tools.simulation.bootstrap import SimBootstrap
from tools.simulation.network import Network
from tools.simulation.options import GRID, Options
from tools.simulation.workers.transfer_engine import AUX_BASE, KV_BASE, STATE_BASE, WINDOW_BASE, descriptor_of
from tools.simulation.world import Process, World
from transfer_backends.contract import (
    Extent,
    KVArgs,
    LayerGroup,
    RankMemory,
    Region,
    SideMemory,
    SidePool,
    TransferConfig,
)
from transfer_backends.decode.lookup import LookUp
from transfer_backends.liveness import GONE, Liveness, ProcessMark

SLOT_BYTES = 8
RANK_BYTES = 1 << 36  # between the pools of two ranks
ONE_HOST = "one-host"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What all workers of a cluster share. `find(name)`: the living process `node.life`. `followers`: by node and pid."""

    world: World
    network: Network
    options: Options
    config: TransferConfig
    directory: dict[bytes, Any]
    followers: dict[tuple[str, int], Process]
    find: Callable[[str], Process | None]
    bootstrap_of: Callable[[str], SimBootstrap | None]
    shared_bootstrap: str | None
    prefix_sources: dict[str, KVSource] = field(default_factory=dict)  # of the last life of each node

    def reach(self, node: str, address: str) -> bool:
        return self.network.reachable(node, address.partition(":")[0])

    def liveness(self, node: str, mark: ProcessMark, control: str) -> Liveness:
        """As transfer_backends/liveness.py, asked on `node`: by one process table, or by knocking at the control port."""
        there = control.partition(":")[0]
        if mark == GONE:
            return Liveness.DEAD
        if mark.host == ONE_HOST:
            process = self.followers.get((there, mark.pid)) or self.find(f"{there}.{mark.pid}")
            return Liveness.ALIVE if process is not None and process.alive else Liveness.DEAD
        if not self.reach(node, control):
            return Liveness.UNKNOWN
        address = f"{there}:{mark.port}" if mark.port else control
        return Liveness.ALIVE if address in self.network.listeners else Liveness.DEAD


def kv_args_of(
    options: Options, *, num_pages: int, names: Sequence[str], states: StateSlots | None, windows: WindowPages | None
) -> KVArgs:
    """`names`: of the ranks' processes. Where there are fewer units than ranks, all hold the same."""
    units, num_ranks = options.kv_units, len(names)
    unit_bytes, held = options.page_size * SLOT_BYTES // units, max(1, units // num_ranks)
    ranks = [
        RankMemory(
            Region(KV_BASE + rank * RANK_BYTES, (1 + num_pages) * held, unit_bytes, None),
            rank * units // num_ranks,
            held,
            0,
            options.layers,
            b"" if rank == 0 else descriptor_of(name),
        )
        for rank, name in enumerate(names)
    ]
    beside = list[tuple[SidePool, SideMemory]]()
    if states is not None:
        beside.append(_pool_of("state", STATE_BASE, states.allocator, SLOT_BYTES))
    if windows is not None:
        beside.append(_pool_of("window", WINDOW_BASE, windows.allocator, options.page_size * SLOT_BYTES))
    parts = tuple(memory for _, memory in beside)
    plain = options.ranks == (1, 1) and units == 1 and not parts
    return KVArgs(
        kv=ranks[0].kv,
        aux=Region(AUX_BASE, options.rows, ROW.itemsize, None),
        signature="simulated",
        page_size=options.page_size,
        dtype="hash",
        kv_checksum="simulated" if options.checksum else "off",
        kv_units=units,
        layer_bytes=() if plain else (unit_bytes // options.layers,) * options.layers,
        ranks=() if plain else tuple(msgspec.structs.replace(rank, pools=parts) for rank in ranks),
        pools=tuple(pool for pool, _ in beside),
    )


def layer_groups(args: KVArgs, layers: int) -> tuple[LayerGroup, ...]:
    """Return what leaves behind each of `layers`; none where pages leave whole."""
    unit_bytes = args.kv.item_bytes
    return tuple(LayerGroup(i, i * unit_bytes // layers) for i in range(1, 1 + layers)) if layers > 1 else ()


def _pool_of(kind: str, base: int, items: PageAllocator, item_bytes: int) -> tuple[SidePool, SideMemory]:
    region = Region(base, 1 + items.num_pages, item_bytes, None)
    return SidePool(kind, item_bytes), SideMemory(region, (Extent(0, 0, item_bytes),))


def make_states(options: Options, *, decodes: bool) -> StateSlots | None:
    slots = options.state_slots[decodes]
    if not slots:
        return None
    lends = options.prefix_fetch
    return StateSlots(num_slots=slots, grid=GRID, keeps_snapshots=lends or not decodes, peers_write=lends)


def make_windows(options: Options, *, decodes: bool) -> WindowPages | None:
    """A pool in which any request fits alone, and few beside it."""
    if not options.window:
        return None
    size, steps, step_tokens = options.page_size, options.depth[decodes], options.chunk + options.chunk // TAIL_SHARE
    least = -(-(options.window - 1 + steps) // size) + 2 + -(-step_tokens * steps // size)
    return WindowPages(
        num_pages=least + options.more_window_pages,
        page_size=size,
        window=options.window,
        steps=steps,
        step_tokens=step_tokens,
    )


def make_scheduler(
    options: Options,
    *,
    num_pages: int,
    draw: random.Random,
    decodes: bool,
    stages: int,
    states: StateSlots | None,
    windows: WindowPages | None,
) -> Scheduler:
    host = _host_tier(options) if options.host_pages else None
    images = ImageCache(max_bytes=options.image_room, token_bytes=1) if options.image_room else None
    room = options.backup_pages if decodes and options.resume == "host" else 0
    core = CoreConfig(
        limits=Limits(
            page_size=options.page_size,
            max_running_requests=options.max_running,
            max_queued_requests=options.max_queued,
            chunked_prefill_size=options.chunk,
            max_prefill_tokens=64,
            priorities=Priorities(preempt_threshold=1, aging_s=1.0) if options.priorities else NO_PRIORITIES,
            resume_elsewhere=decodes and options.resume == "prefill",
            pp_size=stages,
            grid=None if states is None else GRID,
        ),
        num_pages=num_pages,
        ratio=RatioRule(conservativeness=draw.choice([0.0, 0.0, 0.3, 1.0])),
        backup_room=CopySize(room, room, room),
        uniform=draw.random,
    )
    scheduler, _ = build_core(core, MemoryParts(host=host, states=states, windows=windows, images=images))
    return scheduler


def _host_tier(options: Options) -> HostCache:
    """Its pages have other names after an update of the weights: these are forgotten."""
    size = options.page_size
    identity = KVIdentity(
        layout="simulated", dtype="hash", page_size=size, page_bytes=size * SLOT_BYTES, model="hash", weights="w0"
    )
    room = TierRoom(options.host_pages, ahead=options.host_pages // 4)
    return HostCache(room=room, identity=identity)


class SimPool:
    """A thread pool whose work takes a while, then happens at once."""

    def __init__(self, around: Surroundings, process: Process, draw: random.Random) -> None:
        self._around, self._process, self._draw = around, process, draw

    def submit(self, work: Callable[[Any], None], item: Any, /) -> None:
        low_s, high_s = self._around.options.delay_s
        delay_s = 2 * self._draw.uniform(low_s, high_s)
        if isinstance(item, LookUp) and not self._around.reach(self._process.node, item.bootstrap):
            delay_s += 1.0  # until its own timeout
        self._process.after(delay_s, type(item).__name__, work, item)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing to end."""
