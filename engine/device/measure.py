"""Memory needed by steps: measured by running the largest ones before the KV pool exists."""

import gc
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from engine.config import EngineConfig, MemoryFlags
from engine.core.dp_step import Row, agree
from engine.core.plan import Plan
from engine.device.forward_parts import attention_of, context_pages
from engine.device.graphs import graph_bytes, split_bytes
from engine.device.kv_memory import held_by, kept_specs
from engine.device.memory_plan import MeasuredMemory, unmeasured
from engine.device.pools import scratch_pools
from engine.device.step_memory import EngineUse, LoadedRank, MemoryGauge, StepMemory
from engine.executor.model_runner import DeviceOutOfMemory
from engine.executor.warm_up import WarmUp, warm_up
from engine.flags.images import blank_image, largest_image, token_flops
from engine.flags.resolve import FIRST_FLOPS, PROFILE_S, largest_prompt_step, profiled_tokens
from engine.images import ImageInput
from engine.model_files.model_config import ModelConfig
from engine.parallel.layout import Place
from service.flags import ConfigError

log = logging.getLogger(__name__)

RunStep = Callable[[Plan], None]
StepsOver = Callable[[StepMemory], AbstractContextManager[RunStep]]  # what runs steps over it, while the block lasts


@dataclass(frozen=True, slots=True)
class LargestSteps:
    """The largest steps of a rank at `place`, which runs them by `steps_over`.

    Ranks measure at the same time: their steps need one another. `apart`: see `build_pools`.
    """

    rank: LoadedRank
    use: EngineUse
    place: Place
    steps_over: StepsOver
    apart: bool

    def scratch(self) -> StepMemory:
        config = self.rank.config
        specs = kept_specs(config, self.rank.model.cache_specs())
        units = len(held_by(config, self.rank.model_config, self.place).units)
        pool, windows = scratch_pools(config, specs, units=units, apart=self.apart)
        return StepMemory(pool=pool, windows=windows, max_pages=context_pages(config))


def warm(rank: LoadedRank, run: RunStep, *, positions: int) -> None:
    """Run every kind of step. `positions`: maximum of a request.

    Raises DeviceOutOfMemory, ConfigError.
    """
    _check_joint(rank.config, positions)
    steps = steps_of(rank.config, rank.model_config, positions=positions)
    begun_s = time.monotonic()
    warm_up(lambda plan: run(_agreed(plan, rank.config)), steps, progress=rank.machine.progress)
    log.info("warm-up: every kind of step has run, in %.1f s", time.monotonic() - begun_s)


def steps_of(config: EngineConfig, model_config: ModelConfig, *, positions: int) -> WarmUp:
    assert config.max_running_requests is not None, "resolved"
    vision = model_config.vision
    return WarmUp(
        prompt_tokens=largest_prompt_step(config),
        rows=config.max_running_requests,
        positions=positions,
        page_size=config.page_size,
        vocab_size=model_config.vocab_size,
        mixed=bool(config.enable_mixed_chunk),
        drafts=model_config.drafter is not None,
        image=None if vision is None else blank_image(vision, largest_image(config, vision)),
        encoders=config.attention_tp_size if config.mm_enable_dp_encoder else 1,
    )


def measured(trial: LargestSteps) -> MeasuredMemory | None:
    """Raises ConfigError. None: --max-total-tokens is set on a GPU."""
    rank = trial.rank
    if rank.config.max_total_tokens is not None:
        return unmeasured(rank.free, rank.weights) if rank.machine.gauge is None else None
    return measure_on_cpu(trial) if rank.machine.gauge is None else measure(trial, rank.machine.gauge)


def measure(trial: LargestSteps, gauge: MemoryGauge) -> MeasuredMemory:
    """Run every kind of step over a scratch pool, which also compiles kernels. Raises ConfigError.

    Adapters are not loaded yet and not included. After vLLM's profile run.
    """
    rank = trial.rank
    config, model_config = rank.config, rank.model_config
    assert config.context_length is not None, "resolved"
    gauge.release()
    own = gauge.own()
    gauge.begin_peak()
    memory = trial.scratch()
    try:
        with trial.steps_over(memory) as run:
            warm(rank, run, positions=config.context_length)
    except (DeviceOutOfMemory, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"--chunked-prefill-size, --max-running-requests: the GPU has no memory for the largest step beside the weights "
            f"({error}); lower them"
        ) from None
    step = gauge.peak() - own
    backend, _ = attention_of(config, rank.model, memory)
    parts = split_bytes(config, backend)
    del memory, backend
    gc.collect()  # the engine of the steps is a circle, and holds its pools
    gauge.release()
    prefills = rank.machine.prefills and not rank.recurrent and not config.enable_dp_attention
    graphs = parts + graph_bytes(config, model_config, prefills=prefills, row_bytes=rank.model.product_bytes())
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


def measure_on_cpu(trial: LargestSteps) -> MeasuredMemory:
    """Run the largest steps over a scratch pool.

    As `measure`, but a prompt step that would take too long is extrapolated from two shorter ones,
    and an image from a smaller one.
    """
    rank, host = trial.rank, trial.rank.machine.host
    config, model_config, memory = rank.config, rank.model_config, trial.scratch()
    assert config.context_length is not None, "resolved"
    tokens = profiled_tokens(config, model_config)
    steps = replace(
        steps_of(config, model_config, positions=config.context_length),
        prompt_tokens=tokens,
        image=_profiled_image(config, model_config),
    )
    first, *largest, end = [_agreed(plan, config) for plan in steps.largest()]
    peaks = []
    with trial.steps_over(memory) as run:
        run(first)
        for plan in largest:
            before = host.begin_peak()
            run(plan)
            peaks.append(max(0, host.peak() - before))
        run(end)
    half, prompt, samples, *images = peaks
    by_token = max(0, prompt - half) / max(1, tokens - tokens // 2)
    return MeasuredMemory(
        memory=rank.free,
        free=rank.free,
        weights=rank.weights,
        prompts=int(prompt + by_token * (largest_prompt_step(config) - tokens)),
        token_bytes=by_token,
        samples=max([samples, *(_of_largest_image(peak, steps, model_config, config) for peak in images)]),
        graphs=0,
        on_gpu=False,
    )


def _profiled_image(config: EngineConfig, model: ModelConfig) -> ImageInput | None:
    if model.vision is None:
        return None
    assert config.num_threads is not None, "resolved"
    tokens = int(PROFILE_S * FIRST_FLOPS["cpu"] * config.num_threads / token_flops(model.vision))
    return blank_image(model.vision, min(largest_image(config, model.vision), max(1, tokens)))


def _of_largest_image(peak: int, steps: WarmUp, model: ModelConfig, config: MemoryFlags) -> int:
    """Extrapolate the peak of the largest image by tokens from the `peak` of `steps.image`."""
    assert steps.image is not None and model.vision is not None
    return peak * max(1, largest_image(config, model.vision) // steps.image.num_tokens)


def _check_joint(config: EngineConfig, positions: int) -> None:
    """Raises ConfigError where DP ranks with other KV caches would take other steps."""
    assert config.context_length is not None, "resolved"
    step = min(config.context_length, largest_prompt_step(config))
    if config.enable_dp_attention and positions < step:
        raise ConfigError(
            f"--chunked-prefill-size: a step of {step} tokens is more than the {positions} that this DP rank's KV cache holds, so "
            "its steps would differ from other DP ranks'; lower it, or raise --mem-fraction-static or --max-total-tokens"
        )


def _agreed(plan: Plan, config: EngineConfig) -> Plan:
    """The joint step in which each DP rank has this plan, with DP attention."""
    if config.enable_dp_attention:
        row = Row(step=plan.seq, idle=False, tokens=sum(item.q_len for item in plan.items), extend=plan.extend)
        plan.agreed = agree([row] * config.dp_size)
    return plan
