"""Each model family on a GPU in float32, greedy: the tokens of the CPU, by Triton's attention and by torch's.

A way that is not served must be refused at start. The checkpoints are the tests' tiny ones, written on the fly.
"""

import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engine import EagerCapture, Run
from benchmarks.gpu.target import Target
from engine.build import build_engine
from engine.config import EngineConfig
from engine.model_files.model_config import load_model_config
from service.flags import ConfigError
from tests.models.tiny_checkpoints import ARCHITECTURES, make_tiny_checkpoint

WAYS: dict[str, dict[str, Any]] = {
    "triton": {"attention_backend": "triton"},
    "torch": {"attention_backend": "torch", "disable_cuda_graph": True},
}
PROMPTS = [[16 + (7 * i + 13 * t) % 250 for t in range(n)] for i, n in enumerate((5, 40, 130))]
NEW_TOKENS = 8
PROCESSES = 6


def measure(target: Target) -> dict[str, Any]:
    """For each family and way: "same", or why it was refused; raises where tokens differ or a step fails."""
    families = target.pick(list(ARCHITECTURES), ["qwen3"])
    if target.small:
        found = {family: _family(target, family) for family in families}
    else:
        with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
            found = dict(zip(families, pool.map(partial(_family, target), families), strict=True))
    wrong = [f"{family} by {way}: {said}" for family, ways in found.items() for way, said in ways.items() if _bad(said)]
    if wrong:
        raise AssertionError("; ".join(wrong))
    return found


def _bad(said: str) -> bool:
    return said != "same" and not said.startswith("refused: ")


def _family(target: Target, family: str) -> dict[str, str]:
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory(prefix="tandem-families-") as folder:
        path = str(make_tiny_checkpoint(Path(folder), family))
        expected = _tokens(path, device="cpu", attention_backend="torch")
        return {way: _said(target, path, expected, flags) for way, flags in WAYS.items()}


def _said(target: Target, path: str, expected: dict[str, list[int]], flags: dict[str, Any]) -> str:
    try:
        tokens = _tokens(path, device=target.device.type, **flags)
    except ConfigError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return "same" if tokens == expected else "other tokens"


def _tokens(path: str, **flags: Any) -> dict[str, list[int]]:
    config = EngineConfig(
        model_path=path,
        dtype="float32",
        max_total_tokens=1024,
        max_running_requests=4,
        disable_radix_cache=True,
        **flags,
    )
    eager = config.device == "cpu" and config.attention_backend == "triton"
    parts = build_engine(
        config,
        load_model_config(path),
        progress=False,
        capture=EagerCapture if eager else None,
    )
    run = Run(parts, depth=parts.depth)
    for i, prompt in enumerate(PROMPTS):
        run.add(str(i), prompt=prompt, new_tokens=NEW_TOKENS)
    run.drain()
    parts.device.executor.close()
    return run.tokens
