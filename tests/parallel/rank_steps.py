"""Steps of a model or of one rank's part of it, over its own KV pool, with the attention that serves on a CPU."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from engine.attention.backend import make_attention_backend
from engine.executor.decode_tapes import DecodeTapes
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch
from engine.model_files.model_config import ModelConfig, load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from engine.parallel.collectives import SINGLE_RANK, Collectives
from engine.parallel.layout import ALONE, Place, share_of
from engine.parallel.region_plan import RegionPlan
from tests.parallel.ranks_in_threads import run_ranks

PAGE_SIZE, PAGES_EACH, REQUESTS = 8, 12, 4
T = TypeVar("T")


class RankSteps:
    """Up to REQUESTS requests of at most PAGE_SIZE * PAGES_EACH tokens. `tapes`: decode steps are recorded and played."""

    def __init__(self, model: DenseDecoder, config: ModelConfig, place: Place, *, tapes: bool = False) -> None:
        self.model = model
        self._pool = KVPool(model.cache_specs(), num_pages=REQUESTS * PAGES_EACH, page_size=PAGE_SIZE, device="cpu")
        heads = len(share_of(config, place).heads)
        self._backend = make_attention_backend("cpu", self._pool, num_heads=heads)
        self._table = 1 + torch.arange(REQUESTS * PAGES_EACH, dtype=torch.int32).view(REQUESTS, PAGES_EACH)
        self._lengths = [0] * REQUESTS
        self._tapes = DecodeTapes() if tapes else None

    def step(self, new: Mapping[int, Sequence[int]], *, hidden: Tensor | None = None) -> Tensor:
        """Hidden states [T, hidden] of the `new` tokens by request. `hidden`: of the stage before."""
        starts = [self._lengths[slot] for slot in new]
        for slot, ids in new.items():
            self._lengths[slot] += len(ids)
        at = torch.tensor([start + n for start, ids in zip(starts, new.values(), strict=True) for n in range(len(ids))])
        rows = torch.tensor([slot for slot, ids in new.items() for _ in ids])
        decodes = all(len(ids) == 1 for ids in new.values()) and min(starts) > 0
        self._backend.begin(
            StepBatch(
                extend=not decodes,
                q_lens=[len(ids) for ids in new.values()],
                kv_lens=[self._lengths[slot] for slot in new],
                page_table=self._table,
                slots=torch.tensor(list(new)),
                token_pages=self._table[rows, at // PAGE_SIZE].long(),
                token_offsets=at % PAGE_SIZE,
                riders=None if decodes else (),
            )
        )
        inputs = torch.tensor([token for ids in new.values() for token in ids]) if hidden is None else hidden.clone()
        if self._tapes is not None and decodes:
            return self._tapes.forward(self.model, inputs, at, self._backend.attend)
        return self.model.forward(inputs, at, self._backend.attend)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """A copy, for it is overwritten by the next ones."""
        logits = self.model.logits(hidden)
        return None if logits is None else logits.clone()


def load_rank(
    path: str,
    place: Place = ALONE,
    collectives: Collectives = SINGLE_RANK,
    *,
    dtype: str = "bfloat16",
    reduce_units: int = 0,
    tapes: bool = False,
) -> RankSteps:
    config = load_model_config(path)
    model = load_model(
        path,
        config,
        dtype=dtype,
        device="cpu",
        progress=False,
        context_length=512,
        place=place,
        collectives=collectives,
        reduce_units=reduce_units,
    )
    return RankSteps(model, config, place, tapes=tapes)


def by_ranks(path: str, tp_size: int, work: Callable[[RankSteps], T], **options: object) -> list[T]:
    """What `work` returns on each rank of one stage. `options`: as of `load_rank`, and parts of the place."""
    config = load_model_config(path)
    stage = {name: options.pop(name) for name in ("pp_rank", "pp_size") if name in options}

    def run(collectives: Collectives, rank: int = 0) -> T:
        torch.set_num_threads(1)  # each thread has its own number
        place = Place(tp_rank=rank, tp_size=tp_size, **stage)  # type: ignore[arg-type]
        with torch.inference_mode():
            return work(load_rank(path, place, collectives, **options))  # type: ignore[arg-type]

    if tp_size == 1:
        return [run(SINGLE_RANK)]
    plan = RegionPlan(ranks=tp_size, logits_rows=128, vocab=config.vocab_size)
    return run_ranks(plan, lambda collectives: run(collectives, collectives.rank))


def answer(steps: RankSteps, script: Sequence[Mapping[int, Sequence[int]]]) -> list[tuple[Tensor, Tensor | None]]:
    """(hidden states, logits) of each step."""
    return [(hidden, steps.logits(hidden)) for hidden in map(steps.step, script)]


def answers(
    path: str, tp_size: int, script: Sequence[Mapping[int, Sequence[int]]], **options: object
) -> list[list[tuple[Tensor, Tensor | None]]]:
    """`answer` of each rank."""
    return by_ranks(path, tp_size, partial(answer, script=script), **options)
