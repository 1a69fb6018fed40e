"""Memory needed by steps: measured by running the largest ones before the KV pool exists."""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from engine.config import EngineConfig
from engine.core.dp_step import Row, agree
from engine.core.plan import Plan
from engine.device.device import build_device
from engine.device.forward_parts import context_pages
from engine.device.graphs import logits_bytes, num_graphs
from engine.device.kv_memory import held_by, kept_specs
from engine.device.memory_plan import MeasuredMemory, unmeasured
from engine.device.step_memory import RankSeat, Recording, StepMemory
from engine.executor.model_runner import DeviceOutOfMemory
from engine.executor.warm_up import WarmUp, by_executor, warm_up
from engine.flags.images import blank_image, max_image_tokens, token_flops
from engine.flags.resolve import FIRST_FLOPS, PROFILE_S, largest_prompt_step, profiled_tokens
from engine.images import ImageInput
from engine.kv.host_memory import HostMemory
from engine.kv.kv_pool import KVPool
from engine.model_files.model_config import ModelConfig
from engine.model_files.vision_config import VisionConfig
from engine.models.decoder import DenseDecoder
from engine.parallel.layout import ALONE, Place
from service.flags import ConfigError

# ---- a process's share of a GPU

GRAPH_BYTES = 32 << 20  # per graph, an estimate: they share one memory pool
WAIT_S = 30.0  # an ended process frees its memory a little later
ASK_EVERY_S = 0.5

log = logging.getLogger(__name__)


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f}"


class MemoryGauge(Protocol):
    def total(self) -> int: ...

    def free(self) -> int:
        """Bytes free for any process."""

    def own(self) -> int:
        """Bytes of this process."""

    def begin_peak(self) -> None: ...

    def peak(self) -> int:
        """This process's maximum since `begin_peak`."""

    def release(self) -> None:
        """Free torch's cache."""


def await_share(
    gauge: MemoryGauge,
    share: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait up to WAIT_S for this process's share. Raises ConfigError with others' usage.

    GPU memory readings, and the wait for this process's share (engine/device/memory_plan.py).
    Workers on one GPU never race: each stays in its share of the total.
    """
    total, until_s = gauge.total(), clock() + WAIT_S
    asked = False
    while (ours := gauge.free() + gauge.own()) < int(share * total):
        if not asked:
            log.info(
                "GPU memory: others use %s of %s GiB; waiting up to %g s for it", gib(total - ours), gib(total), WAIT_S
            )
            asked = True
        if clock() >= until_s:
            raise ConfigError(_short(total, ours, share))
        sleep(ASK_EVERY_S)


def _short(total: int, ours: int, share: float) -> str:
    fits = int(max(0, ours) / total * 100) / 100
    return (
        f"--mem-fraction-static {share:g}: {gib(int(share * total))} of the GPU's {gib(total)} GiB are this worker's, and other "
        f"processes use {gib(total - ours)}; give each worker on this GPU its share (at most {fits:g} fits here now). If no "
        "process of that size runs (nvidia-smi), a peer still maps the memory of a worker that has ended: restart the peer"
    )


# ---- measure


RunStep = Callable[[Plan], None]
StepsOver = Callable[[KVPool], AbstractContextManager[RunStep]]  # what runs steps over a pool, while the block lasts


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestSteps:
    """The rank whose largest steps are measured. `decodes`, `prefills`: as in EngineUse.

    Ranks measure at the same time, each at its `place`: their steps need one another.
    """

    config: EngineConfig
    model_config: ModelConfig
    model: DenseDecoder
    decodes: bool
    prefills: bool
    progress: bool
    steps_over: StepsOver
    place: Place = ALONE

    @property
    def positions(self) -> int:
        assert self.config.context_length is not None, "resolved"
        return self.config.context_length

    def scratch(self) -> KVPool:
        units = len(held_by(self.config, self.model_config, self.place).units)
        specs, size = kept_specs(self.config, self.model.cache_specs()), self.config.page_size
        return KVPool(specs, num_pages=1, page_size=size, device=self.config.device, units=units)


def measured(
    trial: LargestSteps, gauge: MemoryGauge | None, host: HostMemory, *, free: int, weights: int
) -> MeasuredMemory | None:
    """Return the memory, and what weights and steps of a rank take of it. Raises ConfigError.

    None: --max-total-tokens is set on a GPU. `gauge`: of a GPU. `host`, `free`, `weights`: as in
    `measure_on_cpu`.
    """
    if trial.config.max_total_tokens is not None:
        return unmeasured(free, weights) if gauge is None else None
    if gauge is None:
        return measure_on_cpu(trial, host, free=free, weights=weights)
    return measure(trial, gauge)


def measure(trial: LargestSteps, gauge: MemoryGauge) -> MeasuredMemory:
    """Run every kind of step over a scratch pool, which also compiles kernels. Raises ConfigError.

    Adapters are not loaded yet and not included. After vLLM's profile run.
    """
    config, model_config, decodes = trial.config, trial.model_config, trial.decodes
    gauge.release()
    own = gauge.own()
    gauge.begin_peak()
    pool = trial.scratch()
    try:
        with trial.steps_over(pool) as run:
            warm(config, model_config, run, positions=trial.positions, decodes=decodes, progress=trial.progress)
    except (DeviceOutOfMemory, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"--chunked-prefill-size, --max-running-requests: the GPU has no memory for the largest step beside the weights "
            f"({error}); lower them"
        ) from None
    step = gauge.peak() - own
    del pool
    gc.collect()  # the engine of the steps is a circle, and holds its pool
    gauge.release()
    graphs = num_graphs(config, decodes=decodes, prefills=trial.prefills) * GRAPH_BYTES
    graphs += logits_bytes(config, vocab_size=model_config.vocab_size, decodes=decodes)
    total = gauge.total()
    free = min(total, gauge.free() + gauge.own())
    return MeasuredMemory(
        memory=total,
        free=free,
        weights=own,
        prompts=step,
        token_bytes=step / largest_prompt_step(config),
        samples=step,  # one figure is measured: what shorter prompts leave is not counted on
        graphs=graphs,
        on_gpu=True,
    )


def measure_on_cpu(trial: LargestSteps, host: HostMemory, *, free: int, weights: int) -> MeasuredMemory:
    """Run the largest steps over a scratch pool. `free`: memory for this rank, with its `weights`.

    Where a prompt step would take too long, the cost of a token is extrapolated from two shorter
    steps, and the cost of an image from a smaller one. The rest as in `measure`.
    """
    config, model_config = trial.config, trial.model_config
    pool = trial.scratch()
    tokens = profiled_tokens(config, model_config)
    steps = replace(
        _steps(config, model_config, positions=trial.positions, decodes=trial.decodes),
        prompt_tokens=tokens,
        image=_profiled_image(config, model_config),
    )
    first, *largest, end = [_agreed(plan, config) for plan in steps.largest()]
    peaks = []
    with trial.steps_over(pool) as run:
        run(first)
        for plan in largest:
            before = host.begin_peak()
            run(plan)
            peaks.append(max(0, host.peak() - before))
        run(end)
    half, prompt, samples, *images = peaks
    by_token = max(0, prompt - half) / max(1, tokens - tokens // 2)
    return MeasuredMemory(
        memory=free,
        free=free,
        weights=weights,
        prompts=int(prompt + by_token * (largest_prompt_step(config) - tokens)),
        token_bytes=by_token,
        samples=max([samples, *(_of_largest_image(peak, steps, model_config, config) for peak in images)]),
        graphs=0,
        on_gpu=False,
    )


def _profiled_image(config: EngineConfig, model: ModelConfig) -> ImageInput | None:
    """One that a slow machine, too, encodes soon."""
    if model.vision is None:
        return None
    assert config.num_threads is not None, "resolved"
    tokens = int(PROFILE_S * FIRST_FLOPS["cpu"] * config.num_threads / token_flops(model.vision))
    return blank_image(model.vision, min(_largest_image(config, model.vision), max(1, tokens)))


def _largest_image(config: EngineConfig, vision: VisionConfig) -> int:
    assert config.context_length is not None, "resolved"
    return min(config.context_length, max_image_tokens(vision))


def _of_largest_image(peak: int, steps: WarmUp, model: ModelConfig, config: EngineConfig) -> int:
    """Extrapolate the peak of the largest image by tokens from the `peak` of `steps.image`."""
    assert steps.image is not None and model.vision is not None
    return peak * max(1, _largest_image(config, model.vision) // steps.image.num_tokens)


def _agreed(plan: Plan, config: EngineConfig) -> Plan:
    """Return the joint step in which each DP rank has this plan, with DP attention."""
    if config.enable_dp_attention:
        rows = Row(step=plan.seq, idle=False, tokens=sum(item.q_len for item in plan.items), extend=True)
        plan.agreed = agree([rows] * config.dp_size)
    return plan


@contextmanager
def own_steps(
    config: EngineConfig, model_config: ModelConfig, model: DenseDecoder, seat: RankSeat, pool: KVPool
) -> Iterator[RunStep]:
    """The steps of a rank that samples, none of them recorded."""
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


def warm(
    config: EngineConfig,
    model_config: ModelConfig,
    run: RunStep,
    *,
    positions: int,
    decodes: bool,
    progress: bool,
) -> None:
    """Run every kind of step. `positions`: maximum of a request. Raises DeviceOutOfMemory."""
    steps = _steps(config, model_config, positions=positions, decodes=decodes)
    begun_s = time.monotonic()
    warm_up(run, steps, progress=progress)
    log.info("warm-up: every kind of step has run, in %.1f s", time.monotonic() - begun_s)


def _steps(config: EngineConfig, model_config: ModelConfig, *, positions: int, decodes: bool) -> WarmUp:
    """The steps that an engine may be given."""
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
        image=None if vision is None else blank_image(vision, _largest_image(config, vision)),
        encoders=config.attention_tp_size if config.mm_enable_dp_encoder else 1,
    )
