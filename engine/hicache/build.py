"""Assembly of the host tier: host memory, disk directory and threads, core part."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.core.mem_cache.disk_tier import DiskIndex
from engine.core.mem_cache.host_cache import HostCache
from engine.core.mem_cache.page_allocator import KVIdentity
from engine.flags.resolve import ahead_pages, host_pages
from engine.hicache.page_files import HEADER_BYTES, DirectoryStore, Disk, PageDirectory, PageStore
from engine.hicache.rank_files import OtherRanks, RankDirectories, RanksStore
from engine.kv.host_memory import HostMemory
from engine.kv.host_pool import HostPool, allocate_host_pool
from engine.kv.kv_pool import KVPool
from service.flags import ConfigError


@dataclass(frozen=True, slots=True)
class HostTier:
    cache: HostCache
    pool: HostPool
    disk: Disk | None
    files: str


@dataclass(frozen=True, slots=True)
class RankFiles:
    leader: int
    page_bytes: Sequence[int]
    followers: OtherRanks


def build_host_tier(
    config: EngineConfig,
    pool: KVPool,
    identity: KVIdentity,
    *,
    wakeup: Callable[[], None],
    host: HostMemory,
    ranks: RankFiles | None = None,
) -> HostTier:
    """Raises ConfigError. Disk threads call `wakeup`; ranks share `host` equally."""
    free_bytes = host.available() // config.ranks_here
    pages = host_pages(config, num_pages=pool.num_pages, page_bytes=pool.page_bytes, free_bytes=free_bytes)
    host_pool = allocate_host_pool(pool, pages, flag="--hicache-size", remedy="lower it")
    folders, index = None, None
    if config.hicache_storage_dir is not None:
        of_pages = [pool.page_bytes] if ranks is None else ranks.page_bytes
        folders = RankDirectories(PageDirectory.open(config.hicache_storage_dir), num_ranks=len(of_pages))
        size = sum(HEADER_BYTES + page_bytes for page_bytes in of_pages)
        index = open_index(folders, file_bytes=size, max_gb=config.hicache_storage_size_gb)
    cache = HostCache(
        num_pages=pages,
        identity=identity,
        run_id=uuid.uuid4().hex,
        write_policy=config.hicache_write_policy,
        disk=index,
        prefetch_policy=config.hicache_storage_prefetch_policy,
        ahead_pages=ahead_pages(config, page_bytes=pool.page_bytes),
    )
    disk = None
    if folders is not None and cache.disk is not None:
        own = DirectoryStore(folders.of(0 if ranks is None else ranks.leader), page_of=host_pool.page)
        store: PageStore = own if ranks is None else RanksStore(own, folders, ranks.followers)
        disk = Disk(store, tier=cache.disk, when_done=wakeup)
    return HostTier(cache, host_pool, disk, "" if folders is None else str(folders.path))


def open_index(folders: RankDirectories, *, file_bytes: int, max_gb: float) -> DiskIndex:
    max_bytes = int(max_gb * 1e9)
    if max_bytes < file_bytes:
        raise ConfigError(f"--hicache-storage-size-gb {max_gb}: a page takes {file_bytes} bytes; raise it")
    index = DiskIndex(max_bytes=max_bytes, file_bytes=file_bytes, files=folders.scan())
    if undeleted := folders.delete(index.excess):
        raise ConfigError(
            f"--hicache-storage-dir: {len(undeleted)} files beyond --hicache-storage-size-gb cannot be deleted "
            f"in {folders.path}; delete them or raise the limit"
        )
    return index
