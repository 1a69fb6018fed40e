"""Run by test_decode_graphs.py with TRITON_INTERPRET=1 (it must be set before kernels are defined).

The whole engine with decode graphs (eager ones: the same work over the same buffers, each time anew) beside one without.
"""

import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.random_model import write_model
from engine.core.plan import PAD_PAGE
from engine.executor.decode_graphs import EagerCapture
from tests.engine.engine_in_process import EngineInProcess

PROMPTS = {"a": [20, 30, 40], "b": list(range(20, 37)), "c": [60, 61, 62, 63, 64, 65]}
LENGTHS = {"a": 6, "b": 3, "c": 5}  # the batch shrinks from 3 to 1


def run(engine: EngineInProcess) -> dict[str, list[int]]:
    for rid, prompt in PROMPTS.items():
        engine.add(rid, prompt, max_new_tokens=LENGTHS[rid], temperature=0.0 if rid != "c" else 0.8, seed=3)
    engine.run()
    engine.close()
    return engine.tokens


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tandem-graphs-") as folder:
        write_model(Path(folder), layers=2, hidden=64, intermediate=64)
        check(folder)


def check(folder: str) -> None:
    flags = {"dtype": "float32", "max_running_requests": 4, "max_total_tokens": 160, "disable_radix_cache": True}
    expected = run(EngineInProcess(folder, attention_backend="torch", **flags))
    engine = EngineInProcess(
        folder, depth=2, stream="threaded", attention_backend="triton", capture=EagerCapture, **flags
    )
    graphs, pool = engine.parts.graphs, engine.parts.pool
    assert graphs is not None and graphs.sizes == [1, 2, 4], graphs
    found = run(engine)
    assert found == expected, (found, expected)
    assert graphs.num_replays == max(LENGTHS.values()) - 1, graphs.num_replays
    assert pool.k(0)[PAD_PAGE].any(), "nothing was padded"


if __name__ == "__main__":
    main()
    sys.exit(0)
