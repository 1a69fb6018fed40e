"""Disk tier over ranks: followers read and write their parts of pages."""

from collections.abc import Callable, Sequence

import msgspec

from engine.config import EngineConfig
from engine.core.disk_index import DiskRead, DiskWrite
from engine.device.kv_memory import held_by
from engine.flags.nodes import leader_of
from engine.hicache.build import RankFiles
from engine.kv.cache_spec import CacheSpec, page_bytes_of
from engine.model_files.model_config import ModelConfig
from engine.ranks.followers import Followers
from engine.ranks.links import place_of


def rank_files(config: EngineConfig, model: ModelConfig, specs: Sequence[CacheSpec], followers: Followers) -> RankFiles:
    own, drafters = [spec for spec in specs if not spec.drafter], [spec for spec in specs if spec.drafter]
    assert len({(spec.num_kv_heads, spec.head_dim, spec.dtype) for spec in own}) == 1, specs
    held = [held_by(config, model, place_of(rank, config)) for rank in range(config.num_ranks)]
    layers = [own[:1] * len(h.layers) if not drafters else [*own, *drafters] for h in held]
    sizes = [
        page_bytes_of(of_rank, config.page_size, units=len(h.units)) for of_rank, h in zip(layers, held, strict=True)
    ]
    return RankFiles(leader_of(config), sizes, GroupFiles(followers))


class GroupFiles:
    def __init__(self, followers: Followers) -> None:
        self._followers = followers

    def read(self, work: DiskRead) -> Callable[[], dict[int, str]]:
        return self._apply("read_page", work)

    def write(self, work: DiskWrite) -> Callable[[], dict[int, str]]:
        return self._apply("write_page", work)

    def _apply(self, name: str, work: DiskRead | DiskWrite) -> Callable[[], dict[int, str]]:
        identity = msgspec.to_builtins(work.identity)
        return self._followers.apply(name, key=work.key, host_page=work.host_page, identity=identity).wait
