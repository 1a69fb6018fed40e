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
from engine.messages import LogprobOptions
from tests.engine.engine_in_process import EngineInProcess

PROMPTS = {"a": [20, 30, 40], "b": list(range(20, 37)), "c": [60, 61, 62, 63, 64, 65]}
LOGPROBS = LogprobOptions(-1, 0)
LENGTHS = {"a": 6, "b": 3, "c": 5}  # the batch shrinks from 3 to 1


def run(engine: EngineInProcess) -> tuple[dict[str, list[int]], torch.Tensor]:
    """Tokens, and the logprobs of all of them."""
    for rid, prompt in PROMPTS.items():
        engine.add(
            rid, prompt, max_new_tokens=LENGTHS[rid], temperature=0.0 if rid != "c" else 0.8, seed=3, logprobs=LOGPROBS
        )
    engine.run()
    engine.close()
    return engine.tokens, torch.tensor([entry.logprob for rid in PROMPTS for entry in engine.logprobs[rid]])


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tandem-graphs-") as folder:
        write_model(Path(folder), layers=2, hidden=64, intermediate=64)
        check(folder)


def check(folder: str) -> None:
    flags = {"dtype": "float32", "max_running_requests": 4, "max_total_tokens": 160, "disable_radix_cache": True}
    expected, expected_logprobs = run(EngineInProcess(folder, attention_backend="torch", **flags))
    engine = EngineInProcess(
        folder, depth=2, stream="threaded", attention_backend="triton", capture=EagerCapture, **flags
    )
    graphs, pool = engine.parts.graphs, engine.parts.pool
    assert graphs is not None and graphs.sizes == [1, 2, 4], graphs
    pool.k(0)[PAD_PAGE] = 7.0
    found, logprobs = run(engine)
    assert found == expected, (found, expected)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=0.0, atol=1e-5)
    assert graphs.num_replays == max(LENGTHS.values()) - 1, graphs.num_replays
    assert (pool.k(0)[PAD_PAGE, 0] != 7.0).all(), "nothing was padded"


if __name__ == "__main__":
    main()
    sys.exit(0)
