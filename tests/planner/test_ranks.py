"""`tandem plan --tp-size N` plans the memory that a worker with `--tp-size N` has."""

import pytest

from engine.config import EngineConfig
from engine.model_files.model_config import WIDE_MODEL_PATH, load_model_config
from engine.resolve import resolve
from planner.shape import kv_pages, shape_of
from tests.engine.ranks_in_process import ranks


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
