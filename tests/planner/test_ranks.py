"""`tandem plan --tp-size N` plans the memory that a worker with `--tp-size N` has."""

import pytest

from engine.config import EngineConfig
from engine.device.memory_plan import MeasuredMemory
from engine.device.memory_plan import kv_pages as worker_pages
from engine.flags.resolve import resolve
from engine.model_files.model_config import WIDE_MODEL_PATH, load_model_config
from planner.memory import kv_pages
from planner.step_time import shape_of
from tests.engine.ranks.ranks_in_process import ranks


@pytest.mark.parametrize("tp_size", [2, 4])
def test_pages_and_their_bytes_are_those_of_every_rank(tp_size: int) -> None:
    flags = {"page_size": 4, "max_total_tokens": 1000, "num_threads": 1}
    model = load_model_config(WIDE_MODEL_PATH)
    config = resolve(EngineConfig(model_path=WIDE_MODEL_PATH, **flags), model, cuda=False)
    planned = kv_pages(config, model, tp=tp_size, memory_bytes=None, gpu="--gpu L4", longest=10)
    with ranks(WIDE_MODEL_PATH, tp_size=tp_size, **flags) as group:
        for pool in (group.engine.parts.pool, *group.pools.values()):
            assert pool.num_pages == planned
            assert pool.page_bytes == 4 * shape_of(model, tp_size).kv_bytes


@pytest.mark.parametrize("fraction", [0.5, 0.9])
def test_a_planned_gpu_has_the_pages_of_a_worker_whose_steps_fit(fraction: float) -> None:
    flags = {"device": "cuda", "mem_fraction_static": fraction, "page_size": 16, "chunked_prefill_size": 256}
    given, model = EngineConfig(model_path=WIDE_MODEL_PATH, **flags), load_model_config(WIDE_MODEL_PATH)  # type: ignore[arg-type]
    config, shape = resolve(given, model, cuda=True), shape_of(model)
    memory = shape.weight_bytes + (200 << 20)
    found = MeasuredMemory(
        memory=memory,
        free=memory,
        weights=shape.weight_bytes,
        prompts=4 << 20,
        token_bytes=0,
        samples=4 << 20,
        graphs=1 << 20,
        on_gpu=True,
    )
    pages = worker_pages(given, config, found, page_bytes=16 * shape.kv_bytes, states=0)
    assert pages == kv_pages(config, model, tp=1, memory_bytes=memory, gpu="--gpu L4", longest=10) > 0
