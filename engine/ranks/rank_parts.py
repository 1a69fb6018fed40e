"""Step computation of a follower: over its KV pool, or over scratch while memory is measured."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from engine.config import EngineConfig
from engine.core.plan import Plan
from engine.device.feature_parts import with_draft_futures
from engine.device.forward_parts import ForwardParts, build_forward
from engine.device.graphs import make_drafter, make_graphs, make_recorder
from engine.device.host_copies import make_copies
from engine.device.step_memory import Recording, StepMemory
from engine.executor.graphs import FollowedEnd
from engine.kernels.allreduce import allreduce
from engine.kernels.linear import linear_kernel
from engine.kernels.tape import tape_library
from engine.kv.cache_spec import KVShard
from engine.kv.kv_pool import KVPool
from engine.kv.state_pool import StatePool
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.ranks.follower import RankRunner
from engine.ranks.links import RankLinks, future_map_of, stage_input
from service.flags import ConfigError


def rank_parts(
    config: EngineConfig,
    model_config: ModelConfig,
    model: DenseDecoder,
    links: RankLinks,
    records: Recording,
    memory: StepMemory,
) -> tuple[RankRunner, ForwardParts]:
    """Raises ConfigError. `config` is resolved."""
    assert config.max_running_requests is not None, "resolved"
    parts = build_forward(config, model, memory, records, exchange=links.exchange)
    device = memory.pool.device
    future_map = future_map_of(links, leads=False, device=device, num_slots=config.max_running_requests)
    inputs = with_draft_futures(config, stage_input(links, config, model_config) or future_map, device)
    end = FollowedEnd(is_last=links.after is None)
    recorder = make_recorder(config, parts, records, inputs=inputs)
    drafts = make_drafter(config, model, parts, records, recorder=recorder, sampler=None, inputs=inputs)
    graphs = make_graphs(config, model, parts, records, recorder=recorder, end=end, drafter=drafts)
    beside = [] if drafts is None else drafts.recorded
    runner = RankRunner(
        model=model,
        copies=make_copies(memory, parts.states),
        forward_pass=parts.forward_pass(inputs, graphs, drafts, beside=beside),
        future_map=future_map,
        after=links.after,
        drafts=drafts,
        states=parts.states,
    )
    return runner, parts


@contextmanager
def steps_of_rank(
    config: EngineConfig, model_config: ModelConfig, model: DenseDecoder, links: RankLinks, memory: StepMemory
) -> Iterator[Callable[[Plan], None]]:
    config = replace(config, enable_lora=False, max_mamba_cache_size=2)
    runner, _ = rank_parts(config, model_config, model, links, Recording(), memory)
    yield runner.run
    if memory.pool.device.type == "cuda":
        torch.cuda.synchronize()


# ---- Memory pools of a rank, with their part of the model's.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPools:
    kv: KVPool
    held: KVShard
    states: StatePool | None = None
    windows: KVPool | None = None


# ---- Check that all ranks have the same C kernels, since other arithmetic rounds differently.

_KERNELS: Mapping[str, Callable[[], object]] = {
    "linear.c": linear_kernel,
    "allreduce.c": allreduce,
    "team.c": tape_library,
}


def kernels_here() -> list[str]:
    return [name for name, find in _KERNELS.items() if find() is not None]


def check_same_kernels(own: Sequence[str], of_followers: Mapping[int, Sequence[str]]) -> None:
    """Raises ConfigError with the first different rank."""
    for rank, theirs in sorted(of_followers.items()):
        if list(theirs) != list(own):
            raise ConfigError(
                f"rank {rank} has {_said(theirs)}, the leader {_said(own)}, so their steps would differ; see in the log of that "
                "rank what is missing, or set TANDEM_NO_C_KERNELS=1 for all"
            )


def _said(names: Sequence[str]) -> str:
    return f"the C kernels {', '.join(names)}" if names else "no C kernels"
