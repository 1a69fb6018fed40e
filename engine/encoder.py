"""Vision tower of an encoder worker, and its steps on the device."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from engine.config import EngineConfig
from engine.core.plan import ItemResult, Plan, PlanItem, StepResult
from engine.executor.executor import Stream, StreamTask
from engine.executor.image_pass import ImagePass
from engine.executor.model_runner import DeviceOutOfMemory, compute
from engine.kv.kv_pool import DTYPES, KVPool
from engine.kv.step_batch import PageTable, upload
from engine.model_files.model_config import ModelConfig
from engine.model_files.tensor_names import CLIP, PROJECTOR, VISUAL
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
    model_path: str,
    config: ModelConfig,
    *,
    dtype: str,
    device: str,
    progress: bool,
    dummies: Collection[str] = (),
    changed: Sequence[str] = (),
) -> TowerModel:
    """Raises ConfigError for files that do not fit."""
    given: dict[str, Any] = {"dtype": dtype, "device": device, "stored": config.stored, "dummy": model_path in dummies}
    given["changed"] = changed
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


T = TypeVar("T")


class EncodeRunner:
    """Step of an encoder worker: images -> features -> pages of `pool`, one layer of token rows.

    Runs inside the stream, in plan order. A request's tokens are those of one image, and a token's
    KV is its row of features.
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


def make_runner(config: EngineConfig, model: TowerModel, pool: KVPool) -> EncodeRunner:
    assert config.max_running_requests is not None, "resolved"
    table = PageTable(
        num_slots=config.max_running_requests,
        max_pages=pool.num_pages,
        page_size=pool.page_size,
        device=pool.device,
    )
    return EncodeRunner(model, pool=pool, page_table=table, images=ImagePass(pool.device, dtype=DTYPES[config.dtype]))


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
    """Executor without sampling."""

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
        failure = ""
        try:
            launched.task.result()
        except DeviceOutOfMemory as error:
            failure = str(error)
        items = [ItemResult(token=None) for _ in launched.plan.items]
        return StepResult(seq=launched.plan.seq, items=items, failure=failure)

    def call(self, work: Callable[[], T]) -> T:
        return self._stream.submit(work).result()

    def close(self) -> None:
        self._stream.close()
