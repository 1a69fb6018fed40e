"""What the pairs of shapes serve: the shipped models, whose answers an oracle knows, and tiny ones that remember more than pages.

The answers of a tiny model are those of one engine in this process that computes each prompt whole and caches nothing.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.models.group_models import ALL_WINDOWS, DELTA_RULE, MAMBA2_SHARED, SOME_WINDOWS, Made
from tests.e2e.workload import recall_prompt
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tools.recall.oracle import continuation

Ids = list[int]

PAIRS = 60  # of a recall prompt


def _recalled(prompts: list[Ids], new: int) -> list[Ids]:
    return [continuation(ids, new, ignore_eos=True) for ids in prompts]


@dataclass(frozen=True)
class Subject:
    """`flags`: of every worker. `prompts`: so many, by lot. `right`: their answers of `new` tokens."""

    name: str
    flags: tuple[str, ...] = ()
    prompts: Callable[[random.Random, int], list[Ids]] = field(
        default=lambda rng, count: [recall_prompt(rng, PAIRS) for _ in range(count)]
    )
    right: Callable[[list[Ids], int], list[Ids]] = _recalled


TINY: dict[str, Made] = {
    "delta-rule": DELTA_RULE,
    "mamba2": MAMBA2_SHARED,
    "some-windows": SOME_WINDOWS,
    "all-windows": ALL_WINDOWS,
}


def tiny(name: str, folder: Path) -> Subject:
    """A model of `TINY`, whose checkpoint is written into `folder`."""
    family, fields = TINY[name]
    path = make_tiny_checkpoint(folder / name, family, dtype="float32", **fields)

    def prompts(rng: random.Random, count: int) -> list[Ids]:
        return [prompt_of(100 + 13 * i, rng.randrange(1 << 20)) for i in range(count)]

    def right(asked: list[Ids], new: int) -> list[Ids]:
        flags: dict[str, Any] = {"page_size": 16, "dtype": "float32", "max_total_tokens": 4096, "num_threads": 1}
        with EngineInProcess(path, **flags, chunked_prefill_size=-1, disable_radix_cache=True) as engine:
            for i, ids in enumerate(asked):
                engine.add(str(i), ids, max_new_tokens=new, ignore_eos=True)
            engine.run()
            return [engine.tokens[str(i)] for i in range(len(asked))]

    flags = ("--model-path", path, "--dtype", "float32", "--page-size", "16", "--kv-units", "2", "--num-threads", "1")
    return Subject(name, flags, prompts, right)
