"""The first half of a step: plan -> tensors -> hidden states, by a recorded step or by layers."""

import logging
from collections.abc import Sequence

import torch

from engine.attention.backend import AttentionBackend
from engine.core.plan import Plan, SlotOpen
from engine.executor.forward import StepInputs
from engine.executor.layer_marks import LayerMarks
from engine.executor.step_part import Batch, Forward, RecordedSteps, StepPart
from engine.kv.page_copies import Arrival
from engine.kv.step_batch import PageTable
from engine.models.decoder import DenseDecoder

log = logging.getLogger(__name__)


class ForwardPass:
    """The first half of steps.

    `parts`: in the order in which they add to steps. `recorded`: the first that takes a step
    computes it; else its layers run.
    """

    def __init__(
        self,
        *,
        backend: AttentionBackend,
        page_table: PageTable,
        inputs: StepInputs,
        layers: LayerMarks,
        parts: Sequence[StepPart] = (),
        recorded: Sequence[RecordedSteps] = (),
    ) -> None:
        self._backend = backend
        self._page_table = page_table
        self._inputs = inputs
        self._layers = layers
        self._parts = parts
        self._recorded = recorded

    def attach(self, model: DenseDecoder) -> None:
        """Forget what was kept of another model, and let the parts work with this one."""
        self.detach()
        for part in self._parts:
            part.attach(model)

    def detach(self) -> None:
        """Forget the model and its recorded steps."""
        for part in self._parts:
            part.forget()
        for recorded in self._recorded:
            recorded.forget()

    def record(self, model: DenseDecoder) -> None:
        """Record the graphs, if any. Raises torch.OutOfMemoryError."""
        for recorded in self._recorded:
            recorded.record(model)

    def record_if_possible(self, model: DenseDecoder) -> None:
        """Record the graphs; where there is no memory for them, go on without."""
        try:
            self.record(model)
        except torch.OutOfMemoryError as error:
            log.warning("the worker goes on without graphs: %s", error)

    def open(self, opened: SlotOpen) -> None:
        for part in self._parts:
            part.open(opened)

    def prepare(self, model: DenseDecoder, plan: Plan) -> None:
        """Do what else `plan` holds than its items, of which it may have none.

        Raises torch.OutOfMemoryError.
        """
        for part in self._parts:
            part.prepare(model, plan)

    def run(self, model: DenseDecoder, plan: Plan, arrival: Arrival) -> Forward:
        """Compute the hidden states [T, hidden] of all new tokens, item after item.

        A graph of a decode step samples, too. What is recorded waits for all of `arrival`, anything
        else for a layer of it just before that layer's attention.
        """
        self.place(plan)
        batch = self._expected(model, plan, arrival)
        forward = self._computed(batch)
        return forward if len(batch.items) == len(plan.items) else Forward(forward.hidden[: len(plan.items)])

    def join(self, model: DenseDecoder, plan: Plan, arrival: Arrival) -> None:
        """Take part in a step that at most other DP ranks have tokens in: a plan without items."""
        if plan.agreed is None or not any(plan.agreed.tokens):
            return
        batch = self._expected(model, plan, arrival)
        if batch.items:
            self._computed(batch)
        else:
            model.join()

    def place(self, plan: Plan) -> None:
        """Note the new pages of items."""
        self._page_table.update(plan.items)

    def _expected(self, model: DenseDecoder, plan: Plan, arrival: Arrival) -> Batch:
        batch = Batch(
            model,
            plan,
            arrival,
            backend=self._backend,
            page_table=self._page_table,
            inputs=self._inputs,
            layers=self._layers,
            parts=self._parts,
        )
        for part in self._parts:
            part.expect(batch)
        return batch

    def _computed(self, batch: Batch) -> Forward:
        """Compute a step, rows of padding included."""
        for recorded in self._recorded:
            forward = recorded.run(batch)
            if forward is not None:
                break
        else:
            forward = _by_layers(batch)
        for part in self._parts:
            part.end(batch, forward.hidden)
        return forward


def _by_layers(batch: Batch) -> Forward:
    attend = batch.begin()
    inputs = batch.inputs()
    attend = batch.layers.attend(batch.plan.seq, attend, batch.arrival)
    return Forward(batch.model.forward(inputs, batch.rows.positions, attend, batch.images))
