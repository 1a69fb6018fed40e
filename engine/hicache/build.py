"""Puts the host tier together: host memory, disk folder and threads, and the core's part."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.core.disk_index import DiskIndex
from engine.core.host_cache import HostCache
from engine.core.page_keys import KVIdentity
from engine.hicache.disk import Disk
from engine.hicache.page_file import file_bytes
from engine.hicache.page_folder import PageFolder
from engine.kv.host_memory import available_bytes
from engine.kv.host_pool import HostPool
from engine.kv.kv_pool import KVPool
from engine.local_defaults import usable_cores
from engine.resolve import ahead_pages, host_pages
from service.flags import ConfigError


@dataclass(frozen=True, slots=True)
class HostTier:
    cache: HostCache
    pool: HostPool
    disk: Disk | None


def build_host_tier(
    config: EngineConfig, pool: KVPool, identity: KVIdentity, *, wakeup: Callable[[], None], sharers: int = 1
) -> HostTier:
    """Raises ConfigError. `wakeup` is called in a disk thread whenever work has ended. `sharers`: ranks that take as much."""
    free_bytes = available_bytes() // sharers
    pages = host_pages(config, num_pages=pool.num_pages, page_bytes=pool.page_bytes, free_bytes=free_bytes)
    host_pool = _allocate(pool, pages)
    folder = PageFolder.open(config.hicache_storage_dir) if config.hicache_storage_dir is not None else None
    index = None if folder is None else open_index(folder, identity, max_gb=config.hicache_storage_size_gb)
    cache = HostCache(
        num_pages=pages,
        identity=identity,
        run_id=uuid.uuid4().hex,
        write_policy=config.hicache_write_policy,
        disk=index,
        prefetch_policy=config.hicache_storage_prefetch_policy,
        prefetch_timeout_s=config.hicache_storage_prefetch_timeout_s,
        ahead_pages=ahead_pages(config, page_bytes=pool.page_bytes),
    )
    disk = None
    if folder is not None and cache.disk is not None:
        disk = Disk(folder, tier=cache.disk, page_of=host_pool.page, when_done=wakeup)
    return HostTier(cache, host_pool, disk)


def open_index(folder: PageFolder, identity: KVIdentity, *, max_gb: float) -> DiskIndex:
    """Index the files of the folder, and delete those beyond `max_gb` first."""
    max_bytes = int(max_gb * 1e9)
    if max_bytes < file_bytes(identity):
        raise ConfigError(f"--hicache-storage-size-gb {max_gb}: a page takes {file_bytes(identity)} bytes; raise it")
    index = DiskIndex(max_bytes=max_bytes, file_bytes=file_bytes(identity), files=folder.scan())
    if undeleted := folder.delete(index.excess):
        raise ConfigError(
            f"--hicache-storage-dir: {len(undeleted)} files beyond --hicache-storage-size-gb cannot be deleted "
            f"in {folder.path}; delete them or raise the limit"
        )
    return index


def _allocate(pool: KVPool, pages: int) -> HostPool:
    try:
        return HostPool(pool, num_pages=pages, threads=usable_cores())
    except (MemoryError, OSError, RuntimeError, ValueError) as error:
        size = pages * pool.page_bytes / 1e9
        raise ConfigError(f"--hicache-size: no host memory for {size:.1f} GB ({error}); lower it") from error
