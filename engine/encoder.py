"""Builds the engine of an encoder worker."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from engine.config import EngineConfig
from engine.core.mem_cache.backups import NOTHING
from engine.core.mem_cache.image_cache import ImageCache
from engine.core.plan import ItemResult, Plan, PlanItem, StepResult
from engine.core.scheduler import Scheduler
from engine.core_parts import UNIFIED, EngineUse, build_memory, build_scheduler
from engine.device.device import make_stream
from engine.device.feature_pool import PAGE_TOKENS, encoded_pages, feature_pool
from engine.device.memory_plan import memory_text
from engine.executor.executor import Stream, StreamTask
from engine.executor.image_pass import ImagePass
from engine.executor.model_runner import DeviceOutOfMemory, compute
from engine.executor.weights import WeightActions, WeightUpdater
from engine.flags.encoder import encoder_config, step_images_tokens, vision_of
from engine.flags.model_source import dummy_paths
from engine.flags.resolve import depth
from engine.kv.host_memory import HERE
from engine.kv.kv_pool import DTYPES, KVPool
from engine.kv.pool_memory import MappedMemory
from engine.kv.step_batch import PageTable, upload
from engine.loop.control import FixedKV, KVMemory
from engine.model_files.model_config import ModelConfig
from engine.model_files.vision_config import CLIP, PROJECTOR, VISUAL
from engine.models.checkpoint import Checkpoint
from engine.models.part import ModelPart
from engine.models.vision.tower import VisionTower
from engine.models.vision.towers import load_tower
from service.flags import ConfigError

# ---- A model with only its vision tower loaded.


@dataclass(frozen=True, slots=True)
class TowerModel:
    """The model as the image pass needs it."""

    vision: VisionTower


def load_tower_alone(
    model_path: str, config: ModelConfig, *, dtype: str, device: str, progress: bool, dummies: Collection[str] = ()
) -> TowerModel:
    """Raises ConfigError for files that do not fit. `dummies`: models with dummy weights."""
    given: dict[str, Any] = {"dtype": dtype, "device": device, "stored": config.stored, "dummy": model_path in dummies}
    with (
        torch.inference_mode(),
        Checkpoint(model_path, progress=progress, **given) as checkpoint,
    ):
        checkpoint.ignore_all_but((VISUAL, CLIP, PROJECTOR))
        tower = load_tower(ModelPart(replace(config, stored=None), checkpoint))
        checkpoint.check_all_taken()
    if tower is None:
        raise ConfigError(
            f"--disaggregation-mode encode: the model of {model_path} sees no images; there is nothing to encode"
        )
    return TowerModel(tower)


# ---- one step

T = TypeVar("T")


class EncodeRunner:
    """Step of an encoder worker: images -> features -> pages of `pool`, one layer of token rows.

    Runs inside the stream, in plan order. A request's tokens are those of one image, and a token's
    KV is its row of features, so page allocator, prefix tree and transfers see no difference.
    """

    def __init__(self, model: TowerModel, *, pool: KVPool, page_table: PageTable, images: ImagePass) -> None:
        self._model: TowerModel | None = model
        self._pool = pool
        self._page_table = page_table
        self._images = images

    def use(self, model: TowerModel | None) -> None:
        """Encode by another tower of the same shape from the next step on; None stops encoding."""
        self._model = model
        self._images.forget()

    def run(self, plan: Plan) -> None:
        """Raises DeviceOutOfMemory."""
        assert self._model is not None, "its weights are released"
        model = self._model
        self._page_table.update(plan.items)
        compute(lambda: self._encode(model, plan))

    def _encode(self, model: TowerModel, plan: Plan) -> None:
        self._images.prepare(model, plan)
        rows, features = self._images.rows(plan.items)
        if not rows:
            return
        slots, positions = (upload(torch.tensor(ids)[rows], self._page_table.device) for ids in _places(plan.items))
        pages, offsets = self._page_table.locate(slots, positions)
        written = torch.cat(features).unsqueeze(1)
        self._pool.write(0, pages, offsets, written, written)


def _places(items: list[PlanItem]) -> tuple[list[int], list[int]]:
    """Slot and position of each token of a step."""
    slots = [item.slot for item in items for _ in range(item.q_len)]
    return slots, [position for item in items for position in range(item.start, item.kv_len)]


class EncodeLaunch:
    """A step on the stream."""

    def __init__(self, plan: Plan, task: StreamTask[None]) -> None:
        self.plan = plan
        self.task = task


class EncodeExecutor:
    """The executor of an encoder worker, as the loop's pipeline calls one. Nothing is sampled."""

    def __init__(self, runner: EncodeRunner, stream: Stream) -> None:
        self.runner = runner
        self._stream = stream

    def launch(self, plan: Plan) -> EncodeLaunch:
        return EncodeLaunch(plan, self._stream.submit(lambda: self.runner.run(plan)))

    def launch_forward(self, plan: Plan) -> EncodeLaunch:
        """Never called: no plan has masks."""
        raise AssertionError(f"step {plan.seq} samples nothing")

    def launch_sampling(self, launched: EncodeLaunch) -> None:
        """Never called: no plan samples."""
        raise AssertionError(f"step {launched.plan.seq} samples nothing")

    def collect(self, launched: EncodeLaunch) -> StepResult:
        """Wait for a step. Raises its error, except that a want of memory is its result."""
        failure = ""
        try:
            launched.task.result()
        except DeviceOutOfMemory as error:
            failure = str(error)
        items = [ItemResult(token=None) for _ in launched.plan.items]
        return StepResult(seq=launched.plan.seq, items=items, failure=failure)

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` after every launched step, wait for it, and return or raise its outcome."""
        return self._stream.submit(work).result()

    def close(self) -> None:
        self._stream.close()


# ---- build

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncoderParts:
    """A ready engine. `config` is resolved; `memory`: bytes by use."""

    config: EngineConfig
    model: ModelConfig
    pool: KVPool
    executor: EncodeExecutor
    scheduler: Scheduler
    depth: int
    weights: WeightUpdater[TowerModel]
    kv: KVMemory
    memory: Mapping[str, int]


def build_encoder(
    given: EngineConfig, model: ModelConfig, *, use: EngineUse = UNIFIED, progress: bool = False
) -> EncoderParts:
    """`use`: of the pool's memory. Raises ConfigError."""
    vision = vision_of(model, given.model_path)
    config = encoder_config(given, model, page_size=PAGE_TOKENS, cuda=torch.cuda.is_available())
    assert config.num_threads is not None and config.max_running_requests is not None, "resolved"
    torch.set_num_threads(config.num_threads)
    load = partial(load_tower_alone, dtype=config.dtype, device=config.device, dummies=dummy_paths(config))
    before = _taken(config.device)
    tower = _load_at_start(config, model, load, progress=progress)
    weights_bytes = max(0, _taken(config.device) - before)
    num_pages = encoded_pages(config, model, vision)
    pool = feature_pool(config, model, vision, num_pages=num_pages, allocate=use.allocate_kv)
    token_bytes = pool.page_bytes // PAGE_TOKENS
    images = ImageCache(max_bytes=step_images_tokens(config, vision) * token_bytes, token_bytes=token_bytes)
    memory, _ = build_memory(config, [images], num_pages=num_pages)
    table = PageTable(
        num_slots=config.max_running_requests, max_pages=num_pages, page_size=PAGE_TOKENS, device=pool.device
    )
    runner = EncodeRunner(tower, pool=pool, page_table=table, images=ImagePass(pool.device, dtype=DTYPES[config.dtype]))
    executor = EncodeExecutor(runner, make_stream(config, pool.device))
    bytes_of = {
        "weights": weights_bytes,
        "image_features": (1 + num_pages) * pool.page_bytes,
        "steps": images.max_bytes,
    }
    log.info("memory: %s; features of %d tokens", memory_text(bytes_of), num_pages * PAGE_TOKENS)
    return EncoderParts(
        config=config,
        model=model,
        pool=pool,
        executor=executor,
        scheduler=build_scheduler(config, model, memory, use, backup_room=NOTHING),
        depth=depth(config),
        weights=_updater(config, model, load, executor),
        kv=_memory_of(config, use, pool),
        memory=bytes_of,
    )


def _taken(device: str) -> int:
    return HERE.own() if device == "cpu" else torch.cuda.memory_allocated()


def _load_at_start(
    config: EngineConfig, model: ModelConfig, load: Callable[..., TowerModel], *, progress: bool
) -> TowerModel:
    try:
        return load(config.model_path, model, progress=progress)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"--model-path {config.model_path}: the GPU has no memory for the tower ({error})") from None


def _updater(
    config: EngineConfig, model: ModelConfig, load: Callable[..., TowerModel], executor: EncodeExecutor
) -> WeightUpdater[TowerModel]:
    runner = executor.runner
    return WeightUpdater(
        model_path=config.model_path,
        version=config.weight_version,
        model=model,
        actions=WeightActions(
            load=load,
            install=lambda tower: executor.call(lambda: runner.use(tower)),
            drop=lambda: executor.call(lambda: runner.use(None)),
        ),
        on_cuda=config.device == "cuda",
        dummies=dummy_paths(config),
    )


def _memory_of(config: EngineConfig, use: EngineUse, pool: KVPool) -> KVMemory:
    if use.kv_stays or config.device != "cpu":
        return FixedKV(f"{use.kv_stays or 'features on a GPU stay'}; name the tag weights alone")
    return MappedMemory([pool.buffer])
