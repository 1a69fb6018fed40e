"""Run by test_decode_graphs.py with TRITON_INTERPRET=1 (it must be set before kernels are defined).

The whole engine with decode graphs (eager ones: the same work over the same buffers, each time anew) beside one without.
"""

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import random_model
from engine.executor.decode_graphs import Work
from engine.messages import LogprobOptions
from engine.models.load import load_model
from tests.engine.engine_in_process import EngineInProcess

PROMPTS = {"a": [20, 30, 40], "b": list(range(20, 37)), "c": [60, 61, 62, 63, 64, 65]}
LOGPROBS = LogprobOptions(-1, 0)
LENGTHS = {"a": 5, "b": 2, "c": 4}  # the batch shrinks from 3 to 1


def run(engine: EngineInProcess) -> tuple[dict[str, list[int]], torch.Tensor]:
    """Tokens, and the logprobs of all of them."""
    engine.tokens, engine.logprobs = {}, {}
    for rid, prompt in PROMPTS.items():
        engine.add(
            rid, prompt, max_new_tokens=LENGTHS[rid], temperature=0.0 if rid != "c" else 0.8, seed=3, logprobs=LOGPROBS
        )
    engine.run()
    return engine.tokens, torch.tensor([entry.logprob for rid in PROMPTS for entry in engine.logprobs[rid]])


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tandem-graphs-") as folder:
        old, new = Path(folder) / "old", Path(folder) / "new"
        random_model.HEADS, random_model.KV_HEADS = 4, 2  # the interpreter is slow
        for path in (old, new):
            random_model.write_model(path, layers=1, hidden=64, intermediate=64)
        weights = load_file(new / "model.safetensors")
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].roll(7, 0)
        save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
        check(str(old), str(new))


class CountingCapture:
    """Records nothing and does the work anew: what a graph computes."""

    def __init__(self) -> None:
        self.replays = 0

    def capture(self, work: Work) -> Work:
        def replay() -> Tensor:
            self.replays += 1
            return work()

        return replay


def check(folder: str, other: str) -> None:
    flags = {"dtype": "float32", "max_running_requests": 4, "max_total_tokens": 160, "disable_radix_cache": True}
    plain = [EngineInProcess(path, attention_backend="torch", **flags) for path in (folder, other)]
    (expected, expected_logprobs), (expected_of_other, _) = (run(engine) for engine in plain)
    capture = CountingCapture()
    engine = EngineInProcess(
        folder, depth=2, stream="threaded", attention_backend="triton", capture=lambda: capture, **flags
    )
    graphs, pool = engine.parts.device.graphs, engine.parts.pool
    assert graphs is not None and graphs.sizes == [1, 2, 4], graphs
    pool.k(0)[0] = 7.0
    found, logprobs = run(engine)
    assert found == expected, (found, expected)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=0.0, atol=1e-5)
    assert capture.replays == max(LENGTHS.values()) - 1, capture.replays
    assert (pool.k(0)[0, 0] != 7.0).all(), "nothing was padded"
    model = load_model(other, engine.model, dtype="float32", device="cpu", progress=False)
    engine.parts.weights.take(model, model_path=other, version=None)
    assert run(engine)[0] == expected_of_other != expected, "the graphs of other weights were replayed"
    for used in (engine, *plain):
        used.close()


if __name__ == "__main__":
    main()
    sys.exit(0)
