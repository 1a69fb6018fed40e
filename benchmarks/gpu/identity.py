"""The same tokens on a GPU as on a CPU, in float32, greedy: the model that ships with Tandem, and one of random weights."""

import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import EagerCapture, Run
from benchmarks.gpu.target import Target
from benchmarks.random_model import write_model
from engine.build import build_engine
from engine.config import EngineConfig
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config

WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "no graphs": {"disable_cuda_graph": True},
    "torch": {"attention_backend": "torch", "disable_cuda_graph": True},
    "chunks": {"chunked_prefill_size": 64},
    "drafts": {"speculative_algorithm": "NGRAM"},
}
NEW_TOKENS = 48


def measure(target: Target) -> dict[str, Any]:
    """For each model and way: whether all tokens are those of the CPU; raises where some are not."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="tandem-identity-") as folder:
        write_model(Path(folder), layers=target.pick(4, 1), hidden=target.pick(512, 64))
        for name, path in (("shipped", DEFAULT_MODEL_PATH), ("random", folder)):
            prompts = _prompts(target)
            expected = _tokens(target, path, prompts, device="cpu", attention_backend="torch")
            for way, flags in target.pick(WAYS, {"graphs": {}}).items():
                tokens = _tokens(
                    target, path, prompts, **{"device": target.device.type, "attention_backend": "triton"} | flags
                )
                found[f"{name}, {way}"] = tokens == expected
    different = [name for name, same in found.items() if not same]
    if different:
        raise AssertionError(f"other tokens than on the CPU: {', '.join(different)}")
    return found


def _prompts(target: Target) -> list[list[int]]:
    """Runs of tokens that come twice, each token once in a run: the shipped model has one right way to go on, by a wide margin."""
    draw = random.Random(1)
    lengths = target.pick((5, 40, 200, 500, 33), (4, 7, 5))
    halves = [draw.sample(range(16, 528), n) for n in lengths]
    return [half + half[: max(2, len(half) // 2)] for half in halves]


def _tokens(target: Target, path: str, prompts: list[list[int]], **flags: Any) -> dict[str, list[int]]:
    config = EngineConfig(
        model_path=path,
        dtype="float32",
        max_total_tokens=target.pick(4096, 128),
        max_running_requests=target.pick(8, 4),
        disable_radix_cache=True,
        **flags,
    )
    eager = target.small and config.attention_backend == "triton"
    parts = build_engine(
        config,
        load_model_config(path),
        progress=False,
        capture=EagerCapture if eager else None,
    )
    run = Run(parts, depth=2)
    for i, prompt in enumerate(prompts):
        run.add(str(i), prompt=prompt, new_tokens=target.pick(NEW_TOKENS, 4))
    run.drain()
    parts.device.executor.close()
    return run.tokens
