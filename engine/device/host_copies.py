"""Host memory that steps copy to and from: of retracted requests, and of the host tier."""

import logging

from engine.config import ModelFlags
from engine.core.mem_cache.backups import NOTHING, CopySize
from engine.device.pools import Pools
from engine.device.step_memory import StepMemory
from engine.executor.model_runner import Copies
from engine.executor.states import States
from engine.flags.resolve import backup_pages
from engine.kv.host_pool import HostPool, allocate_host_pool
from engine.kv.kv_pool import KVPool
from engine.kv.page_backup import PageBackup
from engine.kv.state_pool import StatePool

log = logging.getLogger(__name__)
FLAG = "--disaggregation-decode-retraction-backup host"


def backup_room(config: ModelFlags, pools: Pools, *, slots: int, slot_bytes: int, free_bytes: int) -> CopySize:
    """Divide host memory among the pools; NOTHING if a page or a state does not fit."""
    found = [(pools.kv.num_pages, pools.kv.page_bytes), (0, 0), (slots, slot_bytes)]
    if pools.windows is not None:
        found[1] = pools.windows.num_pages, pools.windows.page_bytes
    total = sum(count * size for count, size in found)
    pages, windows, states = (
        backup_pages(config, num_pages=count, page_bytes=size, free_bytes=free_bytes * count * size // total)
        if count
        else 0
        for count, size in found
    )
    if pages == 0 or (slots and not states):
        log.warning("retracted requests are computed again: half of the free host memory does not hold one KV page")
        return NOTHING
    return CopySize(pages, windows, states)


def backup_bytes(room: CopySize, pools: Pools, *, slot_bytes: int) -> int:
    windows = 0 if pools.windows is None else pools.windows.page_bytes
    return room.pages * pools.kv.page_bytes + room.windows * windows + room.states * slot_bytes


def make_copies(memory: StepMemory, states: States | None) -> Copies:
    """Raises ConfigError."""
    room, windows = memory.backup_room, memory.windows
    if room == NOTHING:
        return Copies(backup=None, host_pool=memory.host_pool, states=states)
    backup = PageBackup(
        _host(memory.pool, room.pages),
        windows=None if windows is None else _host(windows, room.windows),
        states=None if states is None else _host(states.pool, room.states),
    )
    return Copies(backup=backup, host_pool=memory.host_pool, states=states)


def _host(pool: KVPool | StatePool, count: int) -> HostPool:
    return allocate_host_pool(pool, count, flag=FLAG, remedy="use recompute or prefill")
