"""The largest steps of a rank: which they are, and what runs them, to measure or to warm up."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from engine.config import EngineConfig, MemoryFlags
from engine.core.plan import Plan
from engine.device.device import build_device
from engine.device.forward_parts import context_pages
from engine.device.kv_memory import held_by, kept_specs
from engine.device.step_memory import EngineUse, LoadedRank, RankSeat, Recording, StepMemory
from engine.executor.warm_up import WarmUp, by_executor, warm_up
from engine.flags.images import blank_image, max_image_tokens
from engine.flags.resolve import largest_prompt_step
from engine.kv.kv_pool import KVPool
from engine.model_files.model_config import ModelConfig
from engine.model_files.vision_config import VisionConfig
from engine.models.decoder import DenseDecoder
from engine.parallel.layout import Place

log = logging.getLogger(__name__)


RunStep = Callable[[Plan], None]
StepsOver = Callable[[KVPool], AbstractContextManager[RunStep]]  # what runs steps over a pool, while the block lasts


@dataclass(frozen=True, slots=True)
class LargestSteps:
    """The largest steps of a rank at `place`, which runs them by `steps_over`.

    Ranks measure at the same time: their steps need one another.
    """

    rank: LoadedRank
    use: EngineUse
    place: Place
    steps_over: StepsOver

    def scratch(self) -> KVPool:
        config = self.rank.config
        units = len(held_by(config, self.rank.model_config, self.place).units)
        specs, size = kept_specs(config, self.rank.model.cache_specs()), config.page_size
        return KVPool(specs, num_pages=1, page_size=size, device=config.device, units=units)


@contextmanager
def own_steps(
    config: EngineConfig, model_config: ModelConfig, model: DenseDecoder, seat: RankSeat, pool: KVPool
) -> Iterator[RunStep]:
    device = build_device(
        replace(config, enable_lora=False, max_mamba_cache_size=2),
        model_config,
        model,
        StepMemory(pool=pool, max_pages=context_pages(config)),
        records=Recording(),
        seat=seat,
    )
    try:
        yield by_executor(device.executor)
    finally:
        device.executor.close()


def warm(rank: LoadedRank, run: RunStep, *, positions: int, decodes: bool) -> None:
    """Run every kind of step. `positions`: maximum of a request. Raises DeviceOutOfMemory."""
    steps = steps_of(rank.config, rank.model_config, positions=positions, decodes=decodes)
    begun_s = time.monotonic()
    warm_up(run, steps, progress=rank.machine.progress)
    log.info("warm-up: every kind of step has run, in %.1f s", time.monotonic() - begun_s)


def steps_of(config: EngineConfig, model_config: ModelConfig, *, positions: int, decodes: bool) -> WarmUp:
    assert config.max_running_requests is not None, "resolved"
    vision = model_config.vision
    return WarmUp(
        prompt_tokens=largest_prompt_step(config),
        rows=config.max_running_requests,
        positions=positions,
        page_size=config.page_size,
        vocab_size=model_config.vocab_size,
        decodes=decodes,
        mixed=bool(config.enable_mixed_chunk),
        drafts=model_config.drafter is not None,
        image=None if vision is None else blank_image(vision, largest_image(config, vision)),
        encoders=config.attention_tp_size if config.mm_enable_dp_encoder else 1,
    )


def largest_image(config: MemoryFlags, vision: VisionConfig) -> int:
    assert config.context_length is not None, "resolved"
    return min(config.context_length, max_image_tokens(vision))
