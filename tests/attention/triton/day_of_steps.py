"""Steps of a day of any shapes, as a scheduler plans them: what is launched may not be compiled anew."""

import random
from functools import partial

import torch

from engine.attention.triton_backend import TritonBackend
from engine.core.plan import Plan, PlanItem
from engine.executor.graphs import DecodeGraphs, GraphRecorder, PrefillGraphs, SampledEnd, Work
from engine.executor.layer_marks import LayerMarks
from engine.executor.passes import ForwardPass
from engine.executor.step_part import FutureMap
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import PageTable
from engine.models.decoder import DenseDecoder
from engine.sampler.triton_sampler import TritonSampler
from tests.models.tiny_checkpoints import VOCAB_SIZE

MOST_TOKENS, MAX_REQUESTS, PAGE_SIZE = 4000, 40, 16


class Anew:
    """Records nothing and does the work anew: what a graph computes."""

    def capture(self, work: Work) -> Work:
        return work


class Day:
    """Steps of requests that come, grow and go, as a scheduler plans them: eager, and of recorded sizes."""

    def __init__(self, model: DenseDecoder, rng: random.Random) -> None:
        self._model, self._rng, self._seq = model, rng, 0
        cpu = torch.device("cpu")
        pool = KVPool(model.cache_specs(), num_pages=20, page_size=PAGE_SIZE, device=cpu)
        table = PageTable(num_slots=64, max_pages=MOST_TOKENS // PAGE_SIZE, page_size=PAGE_SIZE, device=cpu)
        future_map, backend = FutureMap.on(cpu, num_slots=64), TritonBackend(pool, num_heads=4)
        recorder = GraphRecorder(Anew, backend, table, future_map)
        end = SampledEnd(TritonSampler(num_slots=64, vocab_size=VOCAB_SIZE, device=cpu), future_map, device=cpu)
        graphs = DecodeGraphs([1, 2, 4, 7], recorder, end=end)
        make = partial(ForwardPass, backend=backend, page_table=table, inputs=future_map, layers=LayerMarks(cpu))
        prompts = PrefillGraphs([16, 64, 300], recorder)
        self._eager, self._recorded = make(), make(recorded=[graphs, prompts])
        self._recorded.record(model)

    def step(self) -> None:
        self._seq += 1
        kind = self._rng.choice(["prompts", "decode", "mixed"])
        count = self._rng.choice([1, 2, 16, self._rng.randint(1, MAX_REQUESTS)])
        slots = self._rng.sample(range(64), count)
        items = [
            self._item(slot, prompt=kind == "prompts" or (kind == "mixed" and i == 0)) for i, slot in enumerate(slots)
        ]
        forward = self._rng.choice([self._eager, self._recorded])
        forward.run(self._model, Plan(self._seq, kind != "decode", items), ())

    def _item(self, slot: int, *, prompt: bool) -> PlanItem:
        most = self._rng.choice([1, 16, 17, 512, MOST_TOKENS])
        kv_len = self._rng.randint(1, most)
        q_len = self._rng.choice([1, min(16, kv_len), self._rng.randint(1, min(kv_len, 300))]) if prompt else 1
        return PlanItem(
            rid=str(slot),
            slot=slot,
            tokens=[0] * q_len,
            start=kv_len - q_len,
            page_start=0,
            new_pages=[1] * -(-kv_len // PAGE_SIZE),
            sample=True,
            output_len=0,
            extend=prompt,
        )
