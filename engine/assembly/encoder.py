"""Assembly of the engine of an encoder worker."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.assembly.core import MemoryParts, build_core
from engine.assembly.leader import core_config
from engine.assembly.loading import updater_of
from engine.assembly.parts import WorkerParts
from engine.config import EngineConfig, ModelFlags
from engine.core.mem_cache.image_cache import ImageCache
from engine.device.device import make_stream
from engine.device.feature_pool import PAGE_TOKENS, encoded_pages, feature_pool
from engine.device.memory_plan import memory_text
from engine.device.step_memory import UNIFIED, EngineUse
from engine.encoder import EncodeExecutor, TowerModel, load_tower_alone, make_runner
from engine.executor.weights import WeightActions, WeightUpdater
from engine.flags.encoder import encoder_config, step_images_tokens, vision_of
from engine.flags.model_source import dummy_paths
from engine.flags.resolve import depth
from engine.kv.host_memory import HERE
from engine.kv.kv_pool import KVPool
from engine.kv.pool_memory import MappedMemory
from engine.loop.control import FixedKV, KVMemory
from engine.model_files.model_config import ModelConfig
from service.flags import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderParts(WorkerParts):
    """`pool` is of features."""

    executor: EncodeExecutor
    weights: WeightUpdater[TowerModel]


def build_encoder(
    given: EngineConfig, model: ModelConfig, *, use: EngineUse = UNIFIED, progress: bool = False
) -> EncoderParts:
    """`use`: of the pool's memory. Raises ConfigError."""
    vision = vision_of(model, given.model_path)
    config = encoder_config(given, model, page_size=PAGE_TOKENS, cuda=torch.cuda.is_available())
    assert config.num_threads is not None, "resolved"
    torch.set_num_threads(config.num_threads)
    dummies = dummy_paths(config)

    def load(
        path: str, found: ModelConfig, *, progress: bool, changed: Sequence[str] = (), adds: bool = False
    ) -> TowerModel:
        dtype, device = config.dtype, config.device
        return load_tower_alone(
            path, found, dtype=dtype, device=device, progress=progress, dummies=dummies, changed=changed
        )

    before = _taken(config.device)
    tower = _load_at_start(config, model, load, progress=progress)
    weights_bytes = max(0, _taken(config.device) - before)
    num_pages = encoded_pages(config, model, vision)
    pool = feature_pool(config, model, vision, num_pages=num_pages, allocate=use.allocate_kv)
    token_bytes = pool.page_bytes // PAGE_TOKENS
    images = ImageCache(max_bytes=step_images_tokens(config, vision) * token_bytes, token_bytes=token_bytes)
    scheduler, _ = build_core(core_config(config, model, use, num_pages=num_pages), MemoryParts(images=images))
    executor = EncodeExecutor(make_runner(config, tower, pool), make_stream(config, pool.device))
    bytes_of = {
        "weights": weights_bytes,
        "image_features": (1 + num_pages) * pool.page_bytes,
        "steps": images.max_bytes,
    }
    weights, trainers = updater_of(config, model, _actions(load, executor))
    log.info("memory: %s; features of %d tokens", memory_text(bytes_of), num_pages * PAGE_TOKENS)
    return EncoderParts(
        config=config,
        model=model,
        pool=pool,
        executor=executor,
        scheduler=scheduler,
        depth=depth(config),
        weights=weights,
        trainers=trainers,
        kv=_memory_of(config, use, pool),
        memory=bytes_of,
    )


def _taken(device: str) -> int:
    return HERE.own() if device == "cpu" else torch.cuda.memory_allocated()


def _load_at_start(
    config: ModelFlags, model: ModelConfig, load: Callable[..., TowerModel], *, progress: bool
) -> TowerModel:
    try:
        return load(config.model_path, model, progress=progress)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"--model-path {config.model_path}: the GPU has no memory for the tower ({error})") from None


def _actions(load: Callable[..., TowerModel], executor: EncodeExecutor) -> WeightActions[TowerModel]:
    runner = executor.runner
    return WeightActions(
        load=load,
        install=lambda tower: executor.call(lambda: runner.use(tower)),
        drop=lambda: executor.call(lambda: runner.use(None)),
    )


def _memory_of(config: ModelFlags, use: EngineUse, pool: KVPool) -> KVMemory:
    if use.kv_stays or config.device != "cpu":
        return FixedKV(f"{use.kv_stays or 'features on a GPU stay'}; name the tag weights alone")
    return MappedMemory([pool.buffer])
