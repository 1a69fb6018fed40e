"""Work of a follower for its leader besides steps, by room.

Readers run in threads of their own, actions between steps.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.assembly.loading import LoadedRank
from engine.assembly.sizes import MemorySizes
from engine.device.device import adapter_store
from engine.device.forward_parts import ForwardParts
from engine.device.step_memory import EngineUse
from engine.executor.profiler import TorchProfiler
from engine.hicache.rank_files import FollowerFiles
from engine.kv.host_pool import HostPool
from engine.loop.control import KVMemory
from engine.messages import StartProfile
from engine.ranks.follower import Action, RankRunner, Reader
from engine.ranks.rank_checksum import RankChecksum, Tail
from engine.ranks.rank_parts import RankPools, kernels_here

Readers = dict[str, Reader]
Actions = dict[str, Action]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRank:
    """A follower with its memory. `folder`: of its parts of page files, if there are files."""

    rank: LoadedRank
    sizes: MemorySizes
    runner: RankRunner
    parts: ForwardParts
    kv: KVMemory
    pools: RankPools
    host_pool: HostPool | None
    folder: Path | None
    use: EngineUse


def _weights(built: BuiltRank, readers: Readers, actions: Actions) -> None:
    running = built.runner.running
    actions.update({"use_weights": running.use, "drop_weights": running.drop})
    actions.update({"forget": lambda _: None, "answer": lambda: None, "kernels": kernels_here})


def _kv(built: BuiltRank, readers: Readers, actions: Actions) -> None:
    actions.update({"release_kv": built.kv.release, "resume_kv": built.kv.resume})


def _adapters(built: BuiltRank, readers: Readers, actions: Actions) -> None:
    if built.parts.adapters is None:
        return
    store = adapter_store(built.sizes.config, built.rank.model, built.parts.adapters, in_order=_now)
    readers["adapter"] = store.read
    actions["add_adapter"] = lambda weights, adapter: store.install(adapter, weights)
    actions["remove_adapter"] = lambda adapter: store.remove(adapter)


def _profiles(built: BuiltRank, readers: Readers, actions: Actions) -> None:
    profiler = TorchProfiler(_now, name=built.use.name)
    actions["start_profile"] = lambda asked: profiler.start(msgspec.convert(asked, StartProfile))
    actions["stop_profile"] = profiler.stop


def _files(built: BuiltRank, readers: Readers, actions: Actions) -> None:
    if built.folder is None or built.host_pool is None:
        return
    identity = built.sizes.identity(built.pools.kv, built.rank.model_config)
    files = FollowerFiles(built.folder, page_of=built.host_pool.page, identity=identity)
    actions.update({"read_page": files.read, "write_page": files.write})


def _checksum(built: BuiltRank, readers: Readers, actions: Actions) -> None:
    landed = threading.Event()
    checksum = RankChecksum(built.pools, wakeup=landed.set)

    def value_of(pages: Sequence[int], tail: Tail, num_tokens: int | None) -> Mapping[str, int]:
        value = checksum(pages, tail, num_tokens)
        while (found := value()) is None:
            landed.wait()
            landed.clear()
        return found

    actions["checksum"] = value_of


FOLLOWER_ROOMS: Sequence[Callable[[BuiltRank, Readers, Actions], None]] = (
    _weights,
    _kv,
    _adapters,
    _profiles,
    _files,
    _checksum,
)


def _now(work: Callable[[], object]) -> object:
    """A follower runs each message when it comes, behind all steps before it."""
    return work()
