"""Assembly of the host tier: host memory, the storage behind it and its threads, core part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config import EngineConfig
from engine.core.mem_cache.host_cache import HostCache, TierRoom
from engine.core.mem_cache.page_allocator import KVIdentity
from engine.core.mem_cache.state_slots import grid_of
from engine.core.mem_cache.storage_tier import FileIndex, StorageIndex
from engine.flags.hicache import MooncakeStoreConfig, ahead_pages, host_pages, mooncake_store
from engine.hicache.mooncake_store import MooncakeStore, connect, copies, place_of
from engine.hicache.page_files import HEADER_BYTES, DirectoryStore, PageDirectory
from engine.hicache.rank_files import FollowerFiles, OtherRanks, RankDirectories, RanksStore
from engine.hicache.storage import Breaker, PageStorage, PageStore, PageView
from engine.kv.host_memory import HostMemory
from engine.kv.host_pool import HostPool, HostStates, allocate_host_pool, allocate_host_states
from engine.kv.kv_pool import KVPool, fingerprint_of
from service.flags import ConfigError


@dataclass(frozen=True, slots=True)
class TierMemory:
    pool: HostPool
    states: HostStates | None

    @property
    def num_states(self) -> int:
        return 0 if self.states is None else self.states.count

    @property
    def size_bytes(self) -> int:
        of_states = 0 if self.states is None else self.states.count * self.states.slot_bytes
        return self.pool.num_pages * self.pool.page_bytes + of_states

    def page(self, number: int) -> memoryview:
        if self.states is None or number < self.pool.num_pages:
            return self.pool.page(number)
        return self.states.slot(number - self.pool.num_pages)


def tier_memory(pool: KVPool, *, pages: int, states: int, slot_bytes: int, flag: str, remedy: str) -> TierMemory:
    """Raises ConfigError."""
    device = pool.device.type
    return TierMemory(
        allocate_host_pool(pool, pages, flag=flag, remedy=remedy),
        allocate_host_states(states, slot_bytes, device=device, flag=flag, remedy=remedy),
    )


@dataclass(frozen=True, slots=True)
class HostTier:
    """`files`: the directory of page files, or ""."""

    cache: HostCache
    memory: TierMemory
    storage: PageStorage | None
    files: str


@dataclass(frozen=True, slots=True)
class RankFiles:
    """`slot_bytes`: on all followers."""

    leader: int
    page_bytes: Sequence[int]
    slot_bytes: int
    followers: OtherRanks


@dataclass(frozen=True, slots=True)
class Backend:
    """A store, its known pages, and the pause after failures.

    `place`: URL. `own_bytes`: given to a shared one.
    """

    index: StorageIndex
    store: PageStore
    breaker: Breaker
    place: str
    files: str = ""
    own_bytes: int = 0


def build_host_tier(
    config: EngineConfig,
    pool: KVPool,
    identity: KVIdentity,
    *,
    slots: int,
    wakeup: Callable[[], None],
    host: HostMemory,
    ranks: RankFiles | None = None,
) -> HostTier:
    """Raises ConfigError. Storage threads call `wakeup`; ranks share `host` equally."""
    free_bytes = host.available() // config.ranks_here
    slot_bytes = identity.state_bytes
    pages, states = host_pages(
        config,
        num_pages=pool.num_pages,
        page_bytes=pool.page_bytes,
        free_bytes=free_bytes,
        slots=slots,
        slot_bytes=slot_bytes,
    )
    memory = tier_memory(
        pool, pages=pages, states=states, slot_bytes=slot_bytes, flag="--hicache-size", remedy="lower it"
    )
    make = {"file": _files, "mooncake": _mooncake}.get(config.hicache_storage_backend or "")
    backend = make(config, memory, identity, ranks) if make else None
    ahead = 0 if states else ahead_pages(config, page_bytes=pool.page_bytes)
    room = TierRoom(pages, states, grid_of(pool.page_size), ahead)
    cache = HostCache(
        room=room,
        identity=identity,
        write_policy=config.hicache_write_policy,
        storage=None if backend is None else backend.index,
        prefetch_policy=config.hicache_storage_prefetch_policy,
    )
    storage = None
    if backend is not None and (tier := cache.storage) is not None:
        place = _shared_url(backend, identity, wait_s=tier.wait_s) if tier.index.asks else backend.place
        storage = PageStorage(backend.store, tier=tier, when_done=wakeup, breaker=backend.breaker, place=place)
    return HostTier(cache, memory, storage, backend.files if backend else "")


def _shared_url(backend: Backend, identity: KVIdentity, *, wait_s: float) -> str:
    # routers price reads by it; workers with equal paths share pages
    size = identity.page_bytes // identity.page_size
    path = f"{backend.place}/{place_of(identity)}"
    return f"{path}?token_bytes={size}&wait_s={wait_s}&tokens={backend.own_bytes // size}"


def _files(config: EngineConfig, memory: TierMemory, identity: KVIdentity, ranks: RankFiles | None) -> Backend:
    """Raises ConfigError."""
    assert config.hicache_storage_dir is not None
    of_pages = [identity.page_bytes] if ranks is None else ranks.page_bytes
    folders = RankDirectories(PageDirectory.open(config.hicache_storage_dir), num_ranks=len(of_pages))
    headers = HEADER_BYTES * len(of_pages)
    state_bytes = headers + identity.state_bytes + (0 if ranks is None else ranks.slot_bytes)
    max_gb = config.hicache_storage_size_gb
    index = open_index(
        folders, file_bytes=headers + sum(of_pages), state_bytes=state_bytes if memory.states else 0, max_gb=max_gb
    )
    own = DirectoryStore(folders.of(0 if ranks is None else ranks.leader), page_of=memory.page)
    store: PageStore = own if ranks is None else RanksStore(own, ranks.followers, folders=folders)
    return Backend(index, store, Breaker(), folders.worker.path.absolute().as_uri(), str(folders.worker.path))


def _mooncake(config: EngineConfig, memory: TierMemory, identity: KVIdentity, ranks: RankFiles | None) -> Backend:
    """Raises ConfigError."""
    where = mooncake_store(config)
    own = _shared_store(where, memory.page, identity)
    store: PageStore = own if ranks is None else RanksStore(own, ranks.followers, folders=None)
    index = StorageIndex(wait_s=where.timeout_s)
    breaker = Breaker(patience_s=where.timeout_s, pause_s=where.pause_s)
    place, own_bytes = f"mooncake://{where.master_server_address}", where.segment_bytes // where.replica_num
    return Backend(index, store, breaker, place, own_bytes=own_bytes)


def _shared_store(where: MooncakeStoreConfig, page_of: PageView, identity: KVIdentity) -> MooncakeStore:
    """Raises ConfigError."""
    return MooncakeStore(
        connect(where),
        page_bytes=identity.page_bytes,
        state_bytes=identity.state_bytes,
        page_of=page_of,
        copies=copies(where.replica_num),
        master=where.master_server_address,
    )


def without_files(config: EngineConfig) -> EngineConfig:
    return config if config.hicache_storage_backend == "mooncake" else replace(config, hicache_storage_backend=None)


def weights_of_pages(config: EngineConfig, files: str) -> str:
    """Fingerprint in pages' keys. Copies of a checkpoint on other machines have other times."""
    return fingerprint_of(config, times=False) if config.hicache_storage_backend == "mooncake" else files


def follower_files(
    config: EngineConfig, memory: TierMemory, identity: KVIdentity, *, rank: int, directory: str
) -> FollowerFiles | None:
    """Raises ConfigError. `directory`: of the leader's files."""
    if config.hicache_storage_backend == "mooncake":
        return FollowerFiles(_shared_store(mooncake_store(config), memory.page, identity), identity=identity)
    if not directory:
        return None
    folder = PageDirectory(Path(directory) / f"rank{rank}")
    return FollowerFiles(DirectoryStore(folder, page_of=memory.page), identity=identity)


def open_index(folders: RankDirectories, *, file_bytes: int, max_gb: float, state_bytes: int = 0) -> FileIndex:
    max_bytes, needed = int(max_gb * 1e9), file_bytes + state_bytes
    if max_bytes < needed:
        beside = " with its state" if state_bytes else ""
        raise ConfigError(f"--hicache-storage-size-gb {max_gb}: a page{beside} takes {needed} bytes; raise it")
    index = FileIndex(max_bytes=max_bytes, file_bytes=file_bytes, state_bytes=state_bytes, files=folders.scan())
    if undeleted := folders.delete(index.excess):
        raise ConfigError(
            f"--hicache-storage-dir: {len(undeleted)} files beyond --hicache-storage-size-gb cannot be deleted "
            f"in {folders.worker.path}; delete them or raise the limit"
        )
    return index
