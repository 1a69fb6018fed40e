"""What an engine's steps take of a GPU's memory: measured by running the largest ones before the KV pool exists."""

import gc
import logging
import time
from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.device import build_device, context_pages
from engine.executor.executor import Executor
from engine.executor.model_runner import DeviceOutOfMemory
from engine.executor.warm_up import WarmUp, warm_up
from engine.gpu_memory import GRAPH_BYTES, GpuMemory, MemoryGauge
from engine.graphs import logits_bytes, num_graphs
from engine.kv.kv_pool import KVPool
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.parallel.layout import ALONE
from engine.pool import held_by
from engine.resolve import largest_prompt_step
from service.flags import ConfigError

log = logging.getLogger(__name__)


def measure(
    config: EngineConfig,
    model_config: ModelConfig,
    model: DenseDecoder,
    gauge: MemoryGauge,
    *,
    decodes: bool,
    prefills: bool,
    progress: bool,
) -> GpuMemory:
    """Run every kind of step over a pool of scratch alone, which also compiles its kernels. Raises ConfigError.

    `decodes`, `prefills`: as in EngineUse.
    After vLLM's profiled run. Adapters are not loaded yet: what they add to a step is not in it.
    """
    assert config.mem_fraction_static is not None and config.context_length is not None, "resolved"
    gauge.release()
    own = gauge.own()
    gauge.begin_peak()
    try:
        _run(config, model_config, model, decodes=decodes, progress=progress)
    except (DeviceOutOfMemory, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"--chunked-prefill-size, --max-running-requests: the GPU has no memory for the largest step beside the weights "
            f"({error}); lower them"
        ) from None
    step = gauge.peak() - own
    gc.collect()  # the engine of the steps is a circle, and holds its pool
    gauge.release()
    graphs = num_graphs(config, decodes=decodes, prefills=prefills) * GRAPH_BYTES
    graphs += logits_bytes(config, vocab_size=model_config.vocab_size, decodes=decodes)
    return GpuMemory(total=gauge.total(), share=config.mem_fraction_static, own=own, step=step, graphs=graphs)


def _run(
    config: EngineConfig, model_config: ModelConfig, model: DenseDecoder, *, decodes: bool, progress: bool
) -> None:
    units = len(held_by(config, model_config, ALONE).units)
    pool = KVPool(model.cache_specs(), num_pages=1, page_size=config.page_size, device=config.device, units=units)
    device = build_device(
        replace(config, enable_lora=False),
        model_config,
        model,
        pool,
        host_pool=None,
        backup=None,
        capture=None,
        decodes=False,
        prefills=False,
        progress=progress,
        max_pages=context_pages(config),
    )
    try:
        assert config.context_length is not None, "resolved"
        warm(config, model_config, device.executor, positions=config.context_length, decodes=decodes, progress=progress)
    finally:
        device.executor.close()


def warm(
    config: EngineConfig,
    model_config: ModelConfig,
    executor: Executor,
    *,
    positions: int,
    decodes: bool,
    progress: bool,
) -> None:
    """Run every kind of step that `executor` may be given. `positions`: of a request. Raises DeviceOutOfMemory."""
    assert config.max_running_requests is not None, "resolved"
    steps = WarmUp(
        prompt_tokens=largest_prompt_step(config),
        rows=config.max_running_requests,
        positions=positions,
        page_size=config.page_size,
        vocab_size=model_config.vocab_size,
        decodes=decodes,
        mixed=bool(config.enable_mixed_chunk),
    )
    begun_s = time.monotonic()
    warm_up(executor, steps, progress=progress)
    log.info("warm-up: every kind of step has run, in %.1f s", time.monotonic() - begun_s)
