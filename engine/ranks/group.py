"""Leader's view of its group."""

import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.core.mem_cache.storage_tier import PageRead, PageWrite
from engine.device.kv_memory import held_by
from engine.flags.nodes import leader_of
from engine.hicache.build import RankFiles
from engine.kv.cache_spec import CacheSpec, page_bytes_of
from engine.loop.control import KVMemory, Profiler
from engine.lora.bank import LoraStore
from engine.messages import StartProfile
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.ranks.followers import Followers, GroupEnded, OnAllRanks
from engine.ranks.links import Joint, RankLinks, place_of
from service.flags import ConfigError
from service.waiter import start_in_thread

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks are counted over all DP ranks with DP attention.

    `transfers`: sockets to followers' transfer engines, by rank. `late`: ranks that others wait
    for.
    """

    links: RankLinks
    pids: Mapping[int, int]
    followers: Followers
    transfers: Mapping[int, socket.socket]
    timeout_s: float
    late: Callable[[], Sequence[int]]
    joint: Joint | None = None

    def late_text(self, late: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} of {self.links.num_ranks} (pid {self.pids.get(rank, '?')})" for rank in late)


class GroupWeights:
    """New weights on all ranks; `load` and `install` are the leader's own."""

    def __init__(
        self, followers: Followers, *, load: Callable[..., DenseDecoder], install: Callable[[DenseDecoder], None]
    ) -> None:
        self._followers = followers
        self._load = load
        self._install = install
        self._prepared = 0

    def load(self, model_path: str, config: ModelConfig, *, progress: bool, **more: Any) -> DenseDecoder:
        """Load all ranks' weights, or none. Raises ConfigError."""

        def read() -> DenseDecoder:
            return self._load(model_path, config, progress=progress, **more)

        model: DenseDecoder
        model, self._prepared = _on_all_ranks(self._followers, "weights", read, path=model_path, **more)
        return model

    def discard(self) -> None:
        self._followers.apply("forget", number=self._prepared).wait()

    def drop(self, own: Callable[[], None]) -> None:
        applied = self._followers.apply("drop_weights")
        own()
        applied.wait()

    def install(self, model: DenseDecoder) -> None:
        applied = self._followers.apply("use_weights", number=self._prepared)
        try:
            self._install(model)
        except torch.OutOfMemoryError as error:
            raise GroupEnded(
                f"the other ranks have graphs of the new weights, this one has no memory: {error}"
            ) from None
        applied.wait()


class GroupKVMemory(OnAllRanks[KVMemory]):
    def release(self) -> None:
        self._own.release()
        self._followers.apply("release_kv").wait()

    def resume(self) -> None:
        self._own.resume()
        self._followers.apply("resume_kv").wait()


_Adapter = tuple[Any, int]  # own weights, and the number of the followers'


class GroupAdapters(OnAllRanks[LoraStore]):
    def start_reading(self, path: str, *, when_done: Callable[[], None]) -> Future[_Adapter]:
        return start_in_thread(lambda: self.read(path), name="lora", when_done=when_done)

    def read(self, path: str) -> _Adapter:
        """Raises ConfigError."""
        return _on_all_ranks(self._followers, "adapter", lambda: self._own.read(path), path=path)

    def install(self, number: int, weights: _Adapter) -> str:
        own, prepared = weights
        applied = self._followers.apply("add_adapter", number=prepared, adapter=number)
        digest = self._own.install(number, own)
        applied.wait()
        return digest

    def remove(self, number: int) -> None:
        applied = self._followers.apply("remove_adapter", adapter=number)
        self._own.remove(number)
        applied.wait()


class GroupProfiler(OnAllRanks[Profiler]):
    def start(self, asked: StartProfile) -> str:
        """Raises ConfigError."""
        path = self._own.start(asked)
        asked = replace(asked, output_dir=str(Path(path).parent))
        try:
            self._followers.apply("start_profile", asked=msgspec.to_builtins(asked)).wait()
        except ConfigError:
            with suppress(ConfigError):  # from a rank without a profile
                self.stop()
            raise
        return path

    def stop(self) -> str:
        stopped = self._followers.apply("stop_profile")
        try:
            path = self._own.stop()
        except ConfigError:
            with suppress(ConfigError):  # likewise
                stopped.wait()
            raise
        stopped.wait()
        return path


def _on_all_ranks(followers: Followers, name: str, read: Callable[[], Any], **args: Any) -> tuple[Any, int]:
    """The leader's value and the followers' number. Raises ConfigError."""
    prepared = followers.prepare(name, **args)
    try:
        try:
            own = read()
        finally:
            prepared.wait()
    except BaseException:
        followers.apply("forget", number=prepared.number).wait()
        raise
    return own, prepared.number


# ---- Disk tier over ranks: followers read and write their parts of pages.


def rank_files(
    config: EngineConfig, model: ModelConfig, specs: Sequence[CacheSpec], followers: Followers, *, slot_bytes: int
) -> RankFiles:
    own, drafters = [spec for spec in specs if not spec.drafter], [spec for spec in specs if spec.drafter]
    assert len({(spec.num_kv_heads, spec.head_dim, spec.dtype) for spec in own}) == 1, specs
    held = [held_by(config, model, place_of(rank, config)) for rank in range(config.num_ranks)]
    layers = [own[:1] * len(h.layers) if not drafters else [*own, *drafters] for h in held]
    sizes = [
        page_bytes_of(of_rank, config.page_size, units=len(h.units)) for of_rank, h in zip(layers, held, strict=True)
    ]
    return RankFiles(leader_of(config), sizes, slot_bytes, GroupFiles(followers))


class GroupFiles:
    def __init__(self, followers: Followers) -> None:
        self._followers = followers

    def read(self, work: PageRead) -> Callable[[], dict[int, str]]:
        return self._apply("read_page", work)

    def write(self, work: PageWrite) -> Callable[[], dict[int, str]]:
        return self._apply("write_page", work)

    def _apply(self, name: str, work: PageRead | PageWrite) -> Callable[[], dict[int, str]]:
        identity = msgspec.to_builtins(work.identity)
        return self._followers.apply(name, key=work.key, host_page=work.host_page, identity=identity).wait
