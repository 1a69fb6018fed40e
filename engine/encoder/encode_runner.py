"""One step of an encoder worker on the device: images -> features -> pages of the feature pool. Runs inside the stream, in plan order.

A request's tokens are those of one image, and what other models compute of a token, its KV, is here its row of features: page
allocator, prefix tree and transfers need not know the difference.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from engine.core.plan import ItemResult, Plan, PlanItem, StepResult
from engine.encoder.tower import TowerModel
from engine.executor.image_pass import ImagePass
from engine.executor.model_runner import DeviceOutOfMemory, compute
from engine.executor.stream import Stream, StreamTask
from engine.kv.kv_pool import KVPool
from engine.kv.page_table import PageTable
from engine.kv.upload import upload

T = TypeVar("T")


class EncodeRunner:
    """`pool`: of features, one layer that keeps a row for each token."""

    def __init__(self, model: TowerModel, *, pool: KVPool, page_table: PageTable, images: ImagePass) -> None:
        self._model: TowerModel | None = model
        self._pool = pool
        self._page_table = page_table
        self._images = images

    def use(self, model: TowerModel | None) -> None:
        """Encode by another tower of the same shape from the next step on; None: no step comes until there is one."""
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
        found = self._images.rows(plan.items)
        if found is None:
            return
        slots, positions = (upload(torch.tensor(ids), self._page_table.device) for ids in _places(plan.items))
        pages, offsets = self._page_table.locate(slots[found.rows], positions[found.rows])
        rows = found.features.unsqueeze(1)
        self._pool.write(0, pages, offsets, rows, rows)


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
        """As `launch_forward`."""
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
