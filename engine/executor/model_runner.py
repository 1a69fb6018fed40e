"""One step on the device: plan -> tensors -> forward -> logits -> tokens. Runs inside the stream, in plan order.

Nothing here waits for the device: on CUDA everything is enqueued and results are copied to pinned memory behind it.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.core.plan import Plan, PlanItem
from engine.executor.decode_graphs import DecodeGraphs
from engine.executor.future_map import FutureMap
from engine.executor.hidden import hidden_rows
from engine.executor.layer_marks import LayerMarks
from engine.kernels.decode_tapes import DecodeTapes
from engine.kv.host_pool import HostPool
from engine.kv.page_backup import PageBackup
from engine.kv.page_table import PageTable
from engine.kv.step_batch import StepBatch
from engine.kv.upload import upload
from engine.lora.bank import AdapterBank
from engine.messages import LogprobOptions
from engine.models.causal_lm import CausalLM
from engine.sampler.sampler import Sampler, asked_logprobs, token_logprobs
from engine.sampler.token_mask import token_mask

PROMPT_LOGPROB_ROWS = 256  # prompt positions whose logits exist at once: [rows, vocab] float32

_NO_TOKENS = torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class Logprobs:
    """Host copies for one item: chosen [n], top values [n, k], top ids [n, k]; `token_ids` [n].

    `asked` [n, len(asked_ids)]: logprobs of `asked_ids` (None when there are none).
    """

    token_ids: Tensor
    chosen: Tensor
    top_values: Tensor
    top_ids: Tensor
    asked_ids: tuple[int, ...] = ()
    asked: Tensor | None = None


@dataclass(slots=True)
class Forward:
    """What the forward leaves on the device for sampling: [T, hidden] of all new tokens, None before it ran."""

    hidden: Tensor | None = None


@dataclass(slots=True)
class StepOutput:
    """Host copies (on CUDA valid after the step's event). Row r of `tokens` belongs to item `sampled[r]`."""

    sampled: list[int]
    tokens: Tensor
    bad: Tensor
    logprobs: dict[int, Logprobs]  # by item index
    input_logprobs: dict[int, list[Logprobs]]
    hidden: dict[int, Tensor] = field(default_factory=dict)  # [n, hidden] float32, by item index


class ModelRunner:
    def __init__(
        self,
        *,
        model: CausalLM,
        backend: AttentionBackend,
        page_table: PageTable,
        future_map: FutureMap,
        sampler: Sampler,
        device: torch.device,
        backup: PageBackup | None = None,
        host_pool: HostPool | None = None,
        adapters: AdapterBank | None = None,
        graphs: DecodeGraphs | None = None,
        tapes: DecodeTapes | None = None,
        layers: LayerMarks | None = None,
    ) -> None:
        self._layers = layers or LayerMarks(device)
        self._backup = backup
        self._host_pool = host_pool
        self._adapters = adapters
        self._graphs = graphs
        self._tapes = tapes
        self._attach(model)
        self._backend = backend
        self._page_table = page_table
        self._future_map = future_map
        self._sampler = sampler
        self._device = device

    def use(self, model: CausalLM) -> None:
        """From the next step on another model of the same shape. Call it in stream order (`Executor.call`)."""
        self._attach(model)
        if self._graphs is not None:
            with self._graphs.or_none():
                self.record()

    def record(self) -> None:
        """Record the decode graphs of the model at hand, if there are to be any. In stream order, before the first step."""
        if self._graphs is None:
            return
        if self._adapters is not None:
            self._adapters.begin(())
        self._graphs.record(self._model)

    def _attach(self, model: CausalLM) -> None:
        self._model = model
        if self._tapes is not None:
            self._tapes.forget()
        if self._adapters is not None:
            self._adapters.attach(model.linear_sites())

    def run(self, plan: Plan) -> StepOutput:
        """Both halves of a step."""
        forward = Forward()
        self.forward(plan, forward)
        return self.sample(plan, forward)

    def forward(self, plan: Plan, out: Forward) -> None:
        """Run all that comes before sampling. Reads no masks."""
        if plan.to_host or plan.from_host:
            assert self._host_pool is not None, "a plan copies to a host tier, and there is none"
            self._host_pool.run(plan)
        if plan.saves or plan.loads or plan.drops:
            assert self._backup is not None, "a plan copies pages, and nothing keeps them"
            self._backup.run(plan)
        for slot in plan.closes:
            self._sampler.close(slot)
        for opened in plan.opens:
            self._sampler.open(opened)
            if self._adapters is not None:
                self._adapters.open(opened)
        if plan.items:
            self._page_table.update(plan.items)
            out.hidden = self._forward(plan)

    def sample(self, plan: Plan, forward: Forward) -> StepOutput:
        """Logits, tokens, and what else was asked for; `forward` of the same plan ran just before."""
        if not plan.items:
            return StepOutput([], _NO_TOKENS, _NO_TOKENS.bool(), {}, {})
        assert forward.hidden is not None, f"step {plan.seq}: the forward has failed"
        output = self._sample(plan.items, forward.hidden, plan.masks)
        output.hidden = {i: self._to_host(rows) for i, rows in hidden_rows(plan.items, forward.hidden).items()}
        return output

    def _forward(self, plan: Plan) -> Tensor:
        """[T, hidden] of all new tokens, item after item."""
        items = plan.items
        if self._adapters is not None:
            self._adapters.begin(items)
        if self._graphs is not None and self._graphs.takes(plan) and self._plain():
            return self._graphs.run(items)
        q_lens = [item.q_len for item in items]
        flat = self._upload([t for item in items for t in item.tokens])
        positions = self._upload([p for i in items for p in range(i.start, i.kv_len)])
        slots = self._upload([item.slot for item in items])
        token_slots = slots if not plan.extend else self._upload(_repeated(items))
        token_pages, token_offsets = self._page_table.locate(token_slots, positions)
        kv_lens = [item.kv_len for item in items]
        step = StepBatch(
            extend=plan.extend,
            q_lens=q_lens,
            kv_lens=kv_lens,
            page_table=self._page_table.rows(slots, max_kv_len=max(kv_lens)),
            positions=positions,
            token_pages=token_pages,
            token_offsets=token_offsets,
            riders=[i for i, item in enumerate(items) if not item.extend],
        )
        self._backend.begin(step)
        input_ids = self._future_map.resolve(flat)
        if self._tapes is not None and not plan.extend and self._tapes.takes(len(items)) and self._plain():
            return self._tapes.forward(self._model, input_ids, positions, self._backend.attend)
        attend = self._layers.attend(plan.seq, self._backend.attend)
        return self._model.forward(input_ids, positions, attend)

    def _plain(self) -> bool:
        """No adapter computes in this step, and nobody follows it layer by layer: it is what graphs and tapes record."""
        return not self._layers.watched and (self._adapters is None or not self._adapters.active)

    def _sample(self, items: list[PlanItem], hidden: Tensor, masks: dict[int, bytes]) -> StepOutput:
        starts = _starts(items)
        sampled = [i for i, item in enumerate(items) if item.sample]
        input_logprobs = {
            i: self._input_logprobs(item, hidden[starts[i] : starts[i] + item.q_len])
            for i, item in enumerate(items)
            if item.logprob_from is not None
        }
        if not sampled:
            return StepOutput([], _NO_TOKENS, _NO_TOKENS.bool(), {}, input_logprobs)
        if len(sampled) == len(hidden):
            logits = self._model.logits(hidden)
        else:
            last_rows = self._upload([starts[i] + items[i].q_len - 1 for i in sampled])
            logits = self._model.logits(hidden[last_rows])
        slots = [items[i].slot for i in sampled]
        mask = token_mask({r: masks[i] for r, i in enumerate(sampled) if i in masks}, device=self._device)
        tokens, bad = self._sampler.sample(logits, slots, [items[i].output_len for i in sampled], mask=mask)
        self._future_map.store(self._upload(slots), tokens)
        return StepOutput(
            sampled=sampled,
            tokens=self._to_host(tokens),
            bad=self._to_host(bad),
            logprobs={
                i: self._logprobs(logits[r : r + 1], tokens[r : r + 1], options)
                for r, i in enumerate(sampled)
                if (options := items[i].logprobs) is not None
            },
            input_logprobs=input_logprobs,
        )

    def _input_logprobs(self, item: PlanItem, hidden: Tensor) -> list[Logprobs]:
        """Logprobs of prompt positions logprob_from.. that this chunk's logits speak about; row i is about i + 1."""
        assert item.logprob_from is not None and item.logprobs is not None
        targets = item.tokens[item.logprob_from - item.start :]
        targets += [] if item.logprob_next is None else [item.logprob_next]
        first_row = item.logprob_from - 1 - item.start
        parts = []
        for at in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            ids = targets[at : at + PROMPT_LOGPROB_ROWS]
            logits = self._model.logits(hidden[first_row + at : first_row + at + len(ids)])
            parts.append(self._logprobs(logits, self._upload(ids), item.logprobs))
        return parts

    def _logprobs(self, logits: Tensor, tokens: Tensor, options: LogprobOptions) -> Logprobs:
        chosen, top_values, top_ids = token_logprobs(logits, tokens, options.top_num)
        to_host = self._to_host
        logprobs = Logprobs(to_host(tokens), to_host(chosen), to_host(top_values), to_host(top_ids))
        if options.token_ids:
            ids = self._upload(options.token_ids)
            logprobs.asked_ids, logprobs.asked = options.token_ids, to_host(asked_logprobs(logits, ids))
        return logprobs

    def _upload(self, values: list[int]) -> Tensor:
        return upload(torch.tensor(values), self._device)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


def _starts(items: list[PlanItem]) -> list[int]:
    starts, at = [], 0
    for item in items:
        starts.append(at)
        at += item.q_len
    return starts


def _repeated(items: list[PlanItem]) -> list[int]:
    return [item.slot for item in items for _ in range(item.q_len)]
