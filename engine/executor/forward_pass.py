"""The first half of a step: plan -> tensors -> hidden states, by a recorded step where there is one."""

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.core.plan import Plan, PlanItem, SlotOpen
from engine.executor.decode_graphs import DecodeGraphs
from engine.executor.decode_tapes import DecodeTapes
from engine.executor.draft_pass import DraftPass
from engine.executor.forward import Forward
from engine.executor.future_map import StepInputs
from engine.executor.image_pass import ImagePass, rope_positions
from engine.executor.joint_steps import JointSteps
from engine.executor.layer_marks import LayerMarks
from engine.executor.prefill_graphs import PrefillGraphs
from engine.executor.states import States
from engine.executor.tree_paths import has_trees, paths_of, places_of
from engine.kv.arrival import Arrival
from engine.kv.page_table import PageTable
from engine.kv.step_batch import StepBatch, WindowRows
from engine.kv.upload import upload
from engine.lora.bank import AdapterBank
from engine.models.decoder import DenseDecoder
from engine.models.vision.tower import ImageRows

log = logging.getLogger(__name__)


class ForwardBatch(NamedTuple):
    """The new tokens of a step, item after item: `step` as kernels see it, `ids` [T] int64, some of them placeholders.

    `positions`: of RoPE, [T] int64, or with tokens of images [3, T] (time, row, column).
    """

    items: list[PlanItem]
    step: StepBatch
    ids: Tensor
    positions: Tensor


class ForwardPass:
    """`graphs` and `tapes` are recorded decode steps, `prefill_graphs` short prompts; `adapters` change the model's layers.

    `joint`: with DP attention, what a step needs to know of the other DP ranks. `states`: of a model with recurrent layers.
    `window_table`: of layers with a window, where they have a pool of their own. `drafts`: of a model with a drafter. `sees`: its tokens may be
    those of images, whose features the first stage has in `images`.
    """

    def __init__(
        self,
        *,
        backend: AttentionBackend,
        page_table: PageTable,
        inputs: StepInputs,
        layers: LayerMarks,
        adapters: AdapterBank | None = None,
        graphs: DecodeGraphs | None = None,
        prefill_graphs: PrefillGraphs | None = None,
        tapes: DecodeTapes | None = None,
        joint: JointSteps | None = None,
        states: States | None = None,
        window_table: PageTable | None = None,
        drafts: DraftPass | None = None,
        sees: bool = False,
        images: ImagePass | None = None,
    ) -> None:
        self._backend = backend
        self._page_table = page_table
        self._inputs = inputs
        self._layers = layers
        self._adapters = adapters
        self._graphs = graphs
        self._prefill_graphs = prefill_graphs
        self._tapes = tapes
        self._joint = joint
        self._states = states
        self._window_table = window_table
        self._drafts = drafts
        self._sees = sees
        self._images = images

    def attach(self, model: DenseDecoder) -> None:
        """Forget the tapes and features of another model, and attach the adapters to this one."""
        if self._tapes is not None:
            self._tapes.forget()
        self._forget_images()
        if self._adapters is not None:
            self._adapters.attach(model.linear_sites())
        if self._states is not None:
            self._states.attach(model)

    def detach(self) -> None:
        """Forget the model and its recorded steps."""
        self._forget_images()
        for recorded in (self._tapes, self._graphs, self._prefill_graphs):
            if recorded is not None:
                recorded.forget()

    def _forget_images(self) -> None:
        if self._images is not None:
            self._images.forget_all()

    def record(self, model: DenseDecoder) -> None:
        """Record the graphs, if any. Raises torch.OutOfMemoryError."""
        if self._adapters is not None:
            self._adapters.begin(())
        if self._graphs is not None:
            self._graphs.record(model)
        if self._prefill_graphs is not None:
            self._prefill_graphs.record(model)

    def record_if_possible(self, model: DenseDecoder) -> None:
        """Record the graphs; where there is no memory for them, go on without."""
        try:
            self.record(model)
        except torch.OutOfMemoryError as error:
            log.warning("the worker goes on without graphs: %s", error)

    def open(self, opened: SlotOpen) -> None:
        if self._adapters is not None:
            self._adapters.open(opened)
        if self._states is not None:
            self._states.open(opened)

    def rewind(self, model: DenseDecoder, plan: Plan) -> None:
        """Take states back, before anything of the step reads them."""
        assert self._states is not None, "the model has no states"
        self._states.rewind(model, plan.rewinds)

    def see(self, model: DenseDecoder, plan: Plan) -> None:
        """On the first stage, forget and encode the images that `plan` names. Raises torch.OutOfMemoryError."""
        if self._images is not None:
            self._images.run(model, plan)

    def run(self, model: DenseDecoder, plan: Plan, arrival: Arrival) -> Forward:
        """Compute the hidden states [T, hidden] of all new tokens, item after item; a graph of a decode step samples, too.

        What is recorded waits for all of `arrival`, anything else for a layer of it just before that layer's attention.
        """
        _before_layers(model)
        items = self._items(plan)
        self.place(items)
        graphs = self._graphs if self._graphs is not None and self._graphs.takes(plan) else None
        if self._layers.watched:
            graphs = None  # a recorded step marks no layers
        if self._adapters is not None:
            recorded = graphs.size_of(items) if graphs is not None and self._adapters.records else None
            self._adapters.begin(items, recorded=recorded)
            if self._adapters.active and not self._adapters.records:
                graphs = None
        if graphs is not None:
            arrival.hold_all()
            return self._replayed(model, plan, graphs)
        hidden = self._hidden(model, plan, items, arrival)
        return Forward(hidden if len(items) == len(plan.items) else hidden[: len(plan.items)])

    def place(self, items: list[PlanItem]) -> None:
        """Note the new pages of items."""
        self._page_table.update(items)
        if self._window_table is not None:
            self._window_table.update_windows(items)

    def _replayed(self, model: DenseDecoder, plan: Plan, graphs: DecodeGraphs) -> Forward:
        """A decode step by its graph, and behind it the drafter's part, kernel by kernel."""
        if self._drafts is None:
            return graphs.run(plan, adapted=self._adapted())
        batch = self._batch(plan, plan.items)
        inputs = self._inputs.resolve(batch.ids)  # the graph stores other tokens
        forward = graphs.run(plan, adapted=self._adapted())
        self._run_drafter(model, plan, batch, inputs, forward.hidden)
        return forward

    def join(self, model: DenseDecoder, plan: Plan, arrival: Arrival) -> None:
        """Take part in a step that at most other DP ranks have tokens in: a plan without items."""
        if plan.agreed is None or not any(plan.agreed.tokens):
            return
        _before_layers(model)
        items = self._items(plan)
        if items:
            self._hidden(model, plan, items, arrival)
        else:
            model.join()

    def _items(self, plan: Plan) -> list[PlanItem]:
        """Return the items of `plan`, and with DP attention the padding that all ranks replay."""
        if self._joint is None:
            return plan.items
        assert plan.agreed is not None, "a forward that the other DP ranks know nothing of"
        return self._joint.begin(plan.agreed, plan.items)

    def _hidden(self, model: DenseDecoder, plan: Plan, items: list[PlanItem], arrival: Arrival) -> Tensor:
        """As `run`, of a step that no decode graph takes."""
        prompts = self._prefill_graphs
        if prompts is not None and prompts.takes(plan) and not self._adapted():
            arrival.hold_all()
            hidden = self._layers.whole(plan.seq, lambda: prompts.run(items))
            if self._drafts is not None:
                batch = self._batch(plan, items)
                self._run_drafter(model, plan, batch, self._inputs.resolve(batch.ids), hidden)
            return hidden
        batch = self._batch(plan, items)
        self._backend.begin(batch.step)
        if self._states is not None:
            self._states.begin(plan, items, batch.step)
        inputs, images = self._inputs.resolve(batch.ids), None
        if (tapes := self._tapes_for(plan)) is not None:
            arrival.hold_all()
            hidden = tapes.forward(model, inputs, batch.positions, self._backend.attend, drafts=batch.step.drafts)
        else:
            attend = self._layers.attend(plan.seq, self._backend.attend, arrival)
            images = None if self._images is None else self._images.rows(items)
            hidden = model.forward(inputs, batch.positions, attend, images)
        if self._states is not None:
            self._states.end(plan)
        if self._drafts is not None:
            arrival.hold_all()
            self._run_drafter(model, plan, batch, inputs, hidden, images)
        return hidden

    def _run_drafter(
        self,
        model: DenseDecoder,
        plan: Plan,
        batch: ForwardBatch,
        inputs: Tensor,
        hidden: Tensor,
        images: ImageRows | None = None,
    ) -> None:
        """Let the drafter keep what it needs of the step's tokens. `inputs`: the `ids` of `batch` without placeholders."""
        assert self._drafts is not None
        self._drafts.follow(model, batch.items, batch.step, inputs, batch.positions, hidden, images)
        self._layers.all_written(plan.seq)

    def _batch(self, plan: Plan, items: list[PlanItem]) -> ForwardBatch:
        q_lens = [item.q_len for item in items]
        ids = self._ids([t for item in items for t in item.tokens])
        positions = self._ids([p for i in items for p in range(i.start, i.kv_len)])
        slots = self._ids([item.slot for item in items])
        token_slots = slots if not plan.extend else self._ids([item.slot for item in items for _ in range(item.q_len)])
        trees = has_trees(items)
        places = self._ids(places_of(items)) if trees else positions
        token_pages, token_offsets = self._page_table.locate(token_slots, places)
        kv_lens = [item.kv_len for item in items]
        step = StepBatch(
            extend=plan.extend,
            q_lens=q_lens,
            kv_lens=kv_lens,
            page_table=self._page_table.rows,
            slots=slots,
            token_pages=token_pages,
            token_offsets=token_offsets,
            riders=[i for i, item in enumerate(items) if not item.extend],
            state_slots=None if self._states is None else self._states.of(slots),
            windows=self._window_rows(token_slots, places),
            drafted=frozenset(i for i, item in enumerate(items) if item.draft),
            paths=paths_of(items, self._page_table.device) if trees else None,
        )
        return ForwardBatch(items, step, ids, rope_positions(items, positions) if self._sees else positions)

    def _window_rows(self, token_slots: Tensor, places: Tensor) -> WindowRows | None:
        if self._window_table is None:
            return None
        return WindowRows(self._window_table.rows, self._window_table.locate(token_slots, places)[0])

    def _tapes_for(self, plan: Plan) -> DecodeTapes | None:
        """The tapes, if they take the step."""
        if self._tapes is None or not self._plain():
            return None
        if self._joint is not None:
            return self._tapes if plan.agreed is not None and self._joint.replays(plan.agreed) else None
        return self._tapes if not plan.extend and self._tapes.takes(len(plan.items)) else None

    def _plain(self) -> bool:
        """Whether no adapter computes in this step and no reader follows its layers: tapes know neither."""
        return not self._layers.watched and not self._adapted()

    def _adapted(self) -> bool:
        return self._adapters is not None and self._adapters.active

    def _ids(self, values: list[int]) -> Tensor:
        return upload(torch.tensor(values), self._page_table.device)


def _before_layers(model: DenseDecoder) -> None:
    """Between two steps experts may move: behind the records of steps, which the host does not see run."""
    if model.balance is not None:
        model.balance.on_step()
