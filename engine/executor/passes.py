"""Forward and sampling of a step: plan -> tensors -> hidden states -> logits -> tokens."""

import logging
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.core.plan import Plan, PlanItem, SlotOpen
from engine.executor.layer_marks import LayerMarks, after_arrival
from engine.executor.step_part import (
    Batch,
    Forward,
    FutureMap,
    ReadDrafts,
    Recorded,
    RecordedSteps,
    Sampled,
    StepInputs,
    StepPart,
    first_rows,
    prompt_parts,
    sampled_rows,
)
from engine.kv.page_copies import Arrival
from engine.kv.step_batch import PageTable, to_host, upload
from engine.messages import LogprobOptions
from engine.models.decoder import DenseDecoder
from engine.sampler.logprobs import Logprobs, Packed, packed_logprobs
from engine.sampler.sampler import TokenSampler
from engine.sampler.sampling import token_mask

# ---- The first half of a step: plan -> tensors -> hidden states, by a recorded step or by layers.

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class ForwardPass:
    """First half of steps. `parts` add in order; the first of `recorded` that can computes it."""

    backend: AttentionBackend
    page_table: PageTable
    inputs: StepInputs
    layers: LayerMarks
    parts: Sequence[StepPart] = ()
    recorded: Sequence[RecordedSteps] = ()
    beside: InitVar[Sequence[Recorded]] = ()

    def __post_init__(self, beside: Sequence[Recorded]) -> None:
        self._all_recorded = [*self.recorded, *beside]

    def attach(self, model: DenseDecoder) -> None:
        """Forget what was kept of another model, and let the parts work with this one."""
        self.detach()
        for part in self.parts:
            part.attach(model)

    def detach(self) -> None:
        for part in self.parts:
            part.forget()
        for recorded in self._all_recorded:
            recorded.forget()

    def record(self, model: DenseDecoder) -> None:
        """Record the graphs, if any. Raises torch.OutOfMemoryError."""
        for recorded in self._all_recorded:
            recorded.record(model)

    def record_if_possible(self, model: DenseDecoder) -> None:
        try:
            self.record(model)
        except torch.OutOfMemoryError as error:
            log.warning("the worker goes on without graphs: %s", error)

    def open(self, opened: SlotOpen) -> None:
        for part in self.parts:
            part.open(opened)

    def prepare(self, model: DenseDecoder, plan: Plan) -> None:
        """Raises torch.OutOfMemoryError."""
        for part in self.parts:
            part.prepare(model, plan)

    def run(self, model: DenseDecoder, plan: Plan, arrivals: Sequence[Arrival]) -> Forward:
        """Compute the hidden states [T, hidden] of all new tokens, item after item.

        Recorded steps wait for all of `arrivals`, others for a layer's before its attention.
        """
        self.place(plan)
        batch = self._expected(model, plan, arrivals)
        forward = self._computed(batch)
        return forward if len(batch.items) == len(plan.items) else Forward(forward.hidden[: len(plan.items)])

    def join(self, model: DenseDecoder, plan: Plan, arrivals: Sequence[Arrival]) -> None:
        if plan.agreed is None or not any(plan.agreed.tokens):
            return
        batch = self._expected(model, plan, arrivals)
        if batch.items:
            self._computed(batch)
        elif self._repeated(batch) is None:
            model.join()

    def place(self, plan: Plan) -> None:
        self.page_table.update(plan.items)

    def _expected(self, model: DenseDecoder, plan: Plan, arrivals: Sequence[Arrival]) -> Batch:
        batch = Batch(
            model,
            plan,
            arrivals,
            backend=self.backend,
            page_table=self.page_table,
            inputs=self.inputs,
            layers=self.layers,
            parts=self.parts,
        )
        for part in self.parts:
            part.expect(batch)
        return batch

    def _computed(self, batch: Batch) -> Forward:
        """Compute a step, rows of padding included."""
        forward = self._repeated(batch) or _by_layers(batch)
        for part in self.parts:
            part.end(batch, forward.hidden)
        return forward

    def _repeated(self, batch: Batch) -> Forward | None:
        """Compute a recorded step, if it is one."""
        steps = (recorded.run(batch) for recorded in self.recorded)
        return next((forward for forward in steps if forward is not None), None)


def _by_layers(batch: Batch) -> Forward:
    attend = batch.begin()
    inputs = batch.inputs()
    for arrival in batch.arrivals:
        attend = after_arrival(attend, arrival)
    if batch.layers.watched:
        attend = batch.layers.attend(batch.plan.seq, attend)
    return Forward(batch.model.forward(inputs, batch.rows.positions, attend, batch.images))


# ---- End of a step: hidden states -> logits -> tokens, logprobs and hidden states for the host.

_NO_TOKENS = torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class StepOutput:
    """Host copies (on CUDA valid after the step's event). Row r of `tokens`: item `sampled[r]`."""

    sampled: list[int]
    tokens: Tensor
    bad: Tensor
    logprobs: dict[int, Logprobs]  # by item index
    input_logprobs: dict[int, list[Logprobs]]
    hidden: dict[int, Tensor] = field(default_factory=dict)  # [n, hidden] float32, by item index
    drafted: ReadDrafts = dict
    on_device: Tensor = _NO_TOKENS  # the tokens, where they were sampled


class SamplePass:
    """Samples tokens, which go to `future_map` for steps launched before the host knows them."""

    def __init__(self, *, sampler: TokenSampler, future_map: FutureMap, device: torch.device) -> None:
        self.sampler = sampler
        self._future_map = future_map
        self._device = device

    def run(self, model: DenseDecoder, plan: Plan, forward: Forward) -> StepOutput:
        hidden = forward.hidden
        items, starts = plan.items, first_rows(plan.items)
        output = self._tokens(model, plan, starts, forward)
        for i, item in enumerate(items):
            if item.hidden_from is not None:
                rows = hidden[starts[i] + item.hidden_from - item.start : starts[i + 1]].to(torch.float32)
                pooled = model.label_logits(rows[-1:]) if item.pool == "labels" else _pool(rows, item.pool)
                output.hidden[i] = to_host(pooled)
        return output

    def _tokens(self, model: DenseDecoder, plan: Plan, starts: list[int], forward: Forward) -> StepOutput:
        """`starts`: the row of the hidden states where each item begins, and the end."""
        items, hidden = plan.items, forward.hidden
        sampled = [i for i, item in enumerate(items) if item.sample]
        input_logprobs = {
            i: self._input_logprobs(model, item, hidden, starts[i])
            for i, item in enumerate(items)
            if item.logprob_from is not None
        }
        if not sampled:
            return nothing_sampled(input_logprobs)
        logits = forward.logits(model, sampled_rows(items, starts))
        tokens, bad = forward.sampled(lambda: self._sample(plan, sampled, logits))
        self._future_map.on_sampled()
        return StepOutput(
            sampled=sampled,
            tokens=to_host(tokens),
            bad=to_host(bad),
            logprobs=self._logprobs(logits, tokens, [(r, i, items[i].logprobs) for r, i in enumerate(sampled)]),
            input_logprobs=input_logprobs,
            on_device=tokens,
        )

    def _sample(self, plan: Plan, sampled: list[int], logits: Tensor) -> Sampled:
        items = [plan.items[i] for i in sampled]
        masks = {row: plan.masks[i] for row, i in enumerate(sampled) if i in plan.masks}
        slots = [item.slot for item in items]
        mask = token_mask(masks, device=self._device)
        drafts = [item.tokens[0] if item.draft else None for item in items] if any(i.draft for i in items) else []
        tokens, bad = self.sampler.sample(logits, slots, [i.output_len for i in items], mask=mask, drafts=drafts)
        self._future_map.store(upload(slots, self._device), tokens)
        return tokens, bad

    def _input_logprobs(self, model: DenseDecoder, item: PlanItem, hidden: Tensor, first_row: int) -> list[Logprobs]:
        assert item.logprobs is not None
        parts = []
        for rows, ids in prompt_parts(item, first_row):
            logits = model.logits(hidden[rows.start : rows.stop])
            packed = self._packed(logits, upload(ids, self._device), [item.logprobs] * len(ids))
            parts.append(_rows(packed, 0, len(ids), item.logprobs))
        return parts

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, rows: Sequence[tuple[int, int, LogprobOptions | None]]
    ) -> dict[int, Logprobs]:
        """Compute logprobs of all rows that request them, by item; rows: (row, item, options)."""
        wanted = [(row, item, options) for row, item, options in rows if options is not None]
        if not wanted:
            return {}
        if len(wanted) < len(rows):
            at = upload([row for row, _, _ in wanted], self._device)
            logits, tokens = logits[at], tokens[at]
        packed = self._packed(logits, tokens, [options for _, _, options in wanted])
        return {item: _rows(packed, n, n + 1, options) for n, (_, item, options) in enumerate(wanted)}

    def _packed(self, logits: Tensor, tokens: Tensor, options: Sequence[LogprobOptions]) -> Packed:
        most, max_ids = max(o.top_num for o in options), max(len(o.token_ids) for o in options)
        ids = [[*o.token_ids, *[0] * (max_ids - len(o.token_ids))] for o in options]
        asked = upload(torch.tensor(ids, dtype=torch.int64).view(len(ids), max_ids), self._device)
        table = to_host(packed_logprobs(logits, tokens, top_num=most, token_ids=asked))
        return Packed(table, most=min(most, logits.shape[1]))


def nothing_sampled(input_logprobs: dict[int, list[Logprobs]]) -> StepOutput:
    return StepOutput([], _NO_TOKENS, _NO_TOKENS.bool(), {}, input_logprobs)


def _rows(packed: Packed, begin: int, end: int, options: LogprobOptions) -> Logprobs:
    return packed.rows(begin, end, top_num=options.top_num, requested_ids=options.token_ids)


def _pool(rows: Tensor, kind: str) -> Tensor:
    if kind == "last":
        return rows[-1:]
    return rows.sum(0, keepdim=True) if kind == "mean" else rows
