"""Parts of `make fuzz` that run in this process: stories from bytes, drawn by hypothesis, until there were enough inputs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import psutil
from hypothesis import HealthCheck, given, seed, settings
from tqdm import tqdm

from tools.fuzz import bodies, sockets
from tools.fuzz.answers import Answers
from tools.fuzz.clients import clients
from tools.fuzz.footprint import assert_no_leak, footprint, note_life, told
from tools.fuzz.source import STORY_BYTES, Target
from tools.fuzz.story import Frames

# Where it fails hypothesis shows the smallest story that does, and its seed.
ROUND = settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck))
LATER = 1_000_000  # the seeds of a next target begin so much later
HERE = "the process"


@dataclass(frozen=True)
class Part:
    """`share`: of all inputs; its `targets`, by what the report calls them, have equal parts of that.

    `slack`: threads and files that stay. `growth_mib`: what the process may grow by; hypothesis keeps something of its own.
    """

    share: float
    targets: dict[str, Callable[[], AbstractContextManager[Target]]]
    slack: int = 0
    growth_mib: float = 24.0


PARTS = {
    "frames": Part(0.5, {"": lambda: nullcontext(Frames())}),
    "sockets": Part(
        0.15, {"": lambda: closing(sockets.Target(None)), "CURVE: ": lambda: closing(sockets.Target(sockets.SECRET))}
    ),
    "bootstrap": Part(
        0.15, {"": lambda: bodies.called_server(None), "signed: ": lambda: bodies.called_server(bodies.SECRET)}
    ),
    "answers": Part(0.15, {"": lambda: nullcontext(Answers())}),
    # Threads of two workers that start when there is work for them, and kept connections; room behind unpacked bodies.
    "clients": Part(0.05, {"": clients}, slack=8, growth_mib=160.0),
}


def fuzz(part: Part, inputs: int, first_seed: int, bar: "tqdm[Any]") -> str:
    """Play until the targets of `part` have seen `inputs`; return what came of it."""
    said = []
    for number, (name, make) in enumerate(part.targets.items(), start=1):
        with make() as target:
            enough = inputs * number // len(part.targets)
            held = _until_enough(part, target, enough, first_seed + LATER * (number - 1), bar)
            said.append(f"{name}{target.result()}; {held}")
    return "; ".join(said)


def _until_enough(part: Part, target: Target, enough: int, number: int, bar: "tqdm[Any]") -> str:
    """Rounds until that many inputs were seen in all; nothing may be held that was not held after the first tenth."""
    process, warm, begun = psutil.Process(), None, bar.n
    warm_at = begun + (enough - begun) / 10

    def step(data: bytes) -> None:
        before = target.num_inputs
        note_life()
        target.run(data)
        bar.update(target.num_inputs - before)

    while bar.n < enough or warm is None:
        seed(number)(ROUND(given(STORY_BYTES)(step)))()
        number += 1
        if warm is None and bar.n >= warm_at and bar.n > begun:
            warm = footprint(process)
    after = assert_no_leak(process, warm, growth_mib=part.growth_mib, slack=part.slack, name=HERE)
    return told({HERE: warm}, {HERE: after})
