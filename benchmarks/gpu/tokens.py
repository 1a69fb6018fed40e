"""The CPU's tokens on a GPU: by every way of one model, and by every family. Times nothing."""

import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import EagerCapture, Run
from benchmarks.gpu.target import TABLE, Target, side_by_side
from benchmarks.random_model import write_model
from engine.assembly.leader import build_engine
from engine.assembly.parts import EngineParts
from engine.config import EngineConfig
from engine.core.mem_cache.host_cache import HostCache
from engine.device.step_memory import LocalMachine
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config
from service.flags import ConfigError
from tests.models.tiny_checkpoints import ARCHITECTURES, make_tiny_checkpoint

Tokens = dict[str, list[int]]


def tokens_of(
    path: str, prompts: list[list[int]], new_tokens: int, *, ahead_pages: int | None = None, **flags: Any
) -> tuple[Tokens, EngineParts]:
    """Return the greedy tokens of `prompts` in float32, and the closed engine. Triton on a CPU runs with eager graphs.

    `ahead_pages`: as of HostCache.
    """
    config = EngineConfig(model_path=path, dtype="float32", **flags)
    eager = config.device == "cpu" and config.attention_backend == "triton"
    capture = EagerCapture if eager else None
    parts = build_engine(config, load_model_config(path), machine=LocalMachine(capture=capture))
    if ahead_pages is not None and (host := parts.scheduler.memory.part(HostCache)) is not None:
        host.ahead_pages = ahead_pages
    run = Run(parts, depth=parts.depth)
    for i, prompt in enumerate(prompts):
        run.add(str(i), prompt=prompt, new_tokens=new_tokens)
    run.drain()
    parts.device.executor.close()
    return run.tokens, parts


# ---- ways of one model


def identity(target: Target) -> dict[str, Any]:
    """Compare each way with the CPU, for the model that ships with Tandem and one of random weights; raises where they differ."""
    found = {}
    sizes = {"max_total_tokens": target.pick(4096, 128), "max_running_requests": target.pick(8, 4)}
    draw = random.Random(1)
    # runs of tokens that come twice, each token once in a run: the shipped model has one right way to go on, by a wide margin
    halves = [draw.sample(range(16, 528), n) for n in target.pick((5, 40, 200, 500, 33), (4, 7, 5))]
    prompts = [half + half[: max(2, len(half) // 2)] for half in halves]
    tokens = partial(tokens_of, prompts=prompts, new_tokens=target.pick(48, 4), disable_radix_cache=True, **sizes)
    with tempfile.TemporaryDirectory(prefix="tandem-identity-") as folder:
        write_model(Path(folder), layers=target.pick(4, 1), hidden=target.pick(512, 64))
        for name, path in (("shipped", DEFAULT_MODEL_PATH), ("random", folder)):
            expected, _ = tokens(path, device="cpu", attention_backend="torch")
            for way, flags in target.pick(TABLE["ways"], {"graphs": {}}).items():
                at = {"device": target.device.type, "attention_backend": "triton"} | flags
                found[f"{name}, {way}"] = tokens(path, **at)[0] == expected
    if different := [name for name, same in found.items() if not same]:
        raise AssertionError(f"other tokens than on the CPU: {', '.join(different)}")
    return found


# ---- families

PROMPTS = [[16 + (7 * i + 13 * t) % 250 for t in range(n)] for i, n in enumerate((5, 40, 130))]
PROCESSES = 6


def families(target: Target) -> dict[str, Any]:
    """For each family and backend: "same", or why it was refused at start; raises where tokens differ or a step fails."""
    names = target.pick(list(ARCHITECTURES), ["qwen3"])
    found = side_by_side(target, {name: partial(_family, target, name) for name in names}, processes=PROCESSES)
    rows = [{"family": family, **ways} for family, ways in found.items()]
    target.keep({"rows": rows})
    said = {f"{family} by {way}": text for family, ways in found.items() for way, text in ways.items()}
    if wrong := [f"{name}: {text}" for name, text in said.items() if text != "same" and text[:9] != "refused: "]:
        raise AssertionError("; ".join(wrong))
    return {"rows": rows}


def _family(target: Target, family: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="tandem-families-") as folder:
        path = str(make_tiny_checkpoint(Path(folder), family))
        flags = {"max_total_tokens": 1024, "max_running_requests": 4, "disable_radix_cache": True}
        prompts = [prompt[: target.pick(130, 20)] for prompt in PROMPTS]
        tokens = partial(tokens_of, path, prompts, target.pick(8, 3), **flags)
        expected, _ = tokens(device="cpu", attention_backend="torch")
        found = {}
        for way, backend in TABLE["backends"].items():
            try:
                found[way] = "same" if tokens(device=target.device.type, **backend)[0] == expected else "other tokens"
            except ConfigError as error:
                found[way] = f"refused: {error}"
            except Exception as error:
                found[way] = f"{type(error).__name__}: {error}"[:300]
        return found
