"""`make rank-shapes`: prefill workers of one shape to decode workers of another, over real transfer engines; docs/reports/rank_faults.json.

usage: python -m tools.faults.ranks.shapes [--backends nixl mooncake] [--subjects recall delta-rule ...] [--report FILE]

All workers of a backend and subject run at once, and each prefill worker serves each decode worker. A cell's answers are right, and
counters show that the KV came from prefill's ranks: all checksums agree, decode computed no prompt, prefill no token twice. Recurrent
states and windows cross between the same shapes; stages keep KV behind windows, so they fit no worker that frees it.
"""

import asyncio
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.launcher.probe import free_ports
from tests.e2e.client import generate, session
from tests.e2e.cluster import READY_S, wait_until
from tests.e2e.models.group_models import ALL_WINDOWS, DELTA_RULE, MAMBA2_SHARED, SOME_WINDOWS, Made
from tests.e2e.workload import recall_prompt
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tools.faults.cells import BACKENDS
from tools.faults.household import Household, unclean
from tools.faults.report import Rows, rank_parser
from tools.recall.oracle import continuation

Ids = list[int]

PAIRS = 60  # of a recall prompt


def _recalled(prompts: list[Ids], new: int) -> list[Ids]:
    return [continuation(ids, new, ignore_eos=True) for ids in prompts]


@dataclass(frozen=True)
class Subject:
    """A model that the pairs serve: a shipped one, whose answers an oracle knows, or a tiny one that remembers more than pages.

    `flags`: of every worker. `prompts`: so many, by lot. `right`: their answers of `new` tokens."""

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
    """A model of `TINY`, written into `folder`. Its answers are those of one engine here that computes each prompt whole."""
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


PROMPTS, NEW = 4, 24
TIGHT = 560  # tokens: what begins does not fit to its end
TIGHT_NEW = 300
START_S = 3 * READY_S
SETTLE_S = 30.0


@dataclass(frozen=True)
class Shape:
    """`units`: --kv-units; None: the default. `tight`: decode retracts, and prefill computes again."""

    tp: int = 1
    pp: int = 1
    model: str = "recall-wide"
    units: int | None = 4
    layerwise: bool = True
    tight: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def name(self) -> str:
        words = [f"tp{self.tp}", *([f"pp{self.pp}"] if self.pp > 1 else [])]
        words += [] if self.model == "recall-wide" else ["shipped" if _is_shipped(self) else self.model]
        words += ["own-units"] if self.units is None and self.model == "recall-wide" else []
        return "-".join([*words, *(["whole"] if not self.layerwise else []), *(["tight"] if self.tight else [])])

    def fits(self, other: "Shape") -> bool:
        return (self.model, self.units) == (other.model, other.units) and (
            self.units or self.tp == other.tp or _is_shipped(self)
        )


def _is_shipped(shape: Shape) -> bool:
    return shape.model == "recall"


SHIPPED = [Shape(tp, model="recall", units=None) for tp in (1, 2)]
PREFILLS = [*(Shape(tp) for tp in (1, 2, 4)), Shape(pp=2), Shape(2, layerwise=False), Shape(2, units=None), *SHIPPED]
DECODES = [*(Shape(tp) for tp in (1, 2, 4)), Shape(pp=2), Shape(2, tight=True), Shape(2, units=None), *SHIPPED]


RECALL = "recall"


def shapes_of(subject: str) -> tuple[list[Shape], list[Shape]]:
    """Of prefill, and of decode."""
    if subject == RECALL:
        return PREFILLS, DECODES
    own = [Shape(tp, model=subject, units=2) for tp in (1, 2, 4)]
    own += [] if "windows" in subject else [Shape(pp=2, model=subject, units=2)]
    return own, own


class Fleet:
    """`close()` must be called."""

    def __init__(self, backend: str, subject: Subject) -> None:
        self.backend = backend
        self.subject = subject
        self.household = Household()
        self.bootstraps: dict[str, int] = {}

    def begin(self, role: str, shape: Shape) -> None:
        port, bootstrap = free_ports(2)
        name = f"{role}-{shape.name}"
        flags = [
            *("--disaggregation-mode", role, "--disaggregation-transfer-backend", self.backend),
            *("--tp-size", str(shape.tp), "--pp-size", str(shape.pp), "--port", str(port)),
            *("--disaggregation-kv-checksum", "--chunked-prefill-size", "64", "--log-level", "warning"),
            *("--max-total-tokens", str(TIGHT if shape.tight else 8192), "--dist-timeout", str(START_S)),
        ]
        flags += self.subject.flags
        if not self.subject.flags:
            flags += ["--model-path", shape.model] if shape.model != "recall" else []
            flags += ["--kv-units", str(shape.units)] if shape.units is not None else []
        if role == "prefill":
            self.bootstraps[name] = bootstrap
            flags += ["--disaggregation-bootstrap-port", str(bootstrap)]
            flags += ["--disaggregation-layerwise-transfer", "on" if shape.layerwise else "off"]
        if shape.tight:
            flags += ["--disaggregation-decode-retraction-backup", "prefill", "--num-reserved-decode-tokens", "0"]
            flags += ["--schedule-conservativeness", "0"]
        self.household.begin(name, ["serve", *flags], url=f"http://127.0.0.1:{port}")

    def await_all(self) -> None:
        for part in self.household.parts.values():
            wait_until(part.is_ready, within_s=START_S, what=lambda part=part: f"{part.name}: {part.log.read_text()}")  # type: ignore[misc]

    async def cell(self, prefill: Shape, decode: Shape, *, room: int) -> dict[str, Any]:
        """One pair: what was asked and how it went; `problems` is empty when all holds."""
        p, d = f"prefill-{prefill.name}", f"decode-{decode.name}"
        parts = [self.household.parts[name] for name in (p, d)]
        before = [part.check()["counters"] for part in parts]
        rng, new = random.Random(room), TIGHT_NEW if decode.tight else NEW
        prompts = self.subject.prompts(rng, PROMPTS)
        rights = self.subject.right(prompts, new)
        async with session() as http:
            answers = await asyncio.gather(
                *(self._ask(http, p, d, ids, new, room + i) for i, ids in enumerate(prompts))
            )
        problems = [
            f"prompt {i}: wrong answer {found[:8]}"
            for i, (right, found) in enumerate(zip(rights, answers, strict=True))
            if found != right
        ]
        problems += await unclean(parts, within_s=SETTLE_S)
        sent, got = (_grown(old, part.check()["counters"]) for old, part in zip(before, parts, strict=True))
        return {"prefill": sent, "decode": got, "problems": problems + _unlike(sent, got, prefill, decode)}

    async def _ask(self, http: Any, p: str, d: str, ids: list[int], new: int, room: int) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstraps[p], "bootstrap_room": room}
        body = {"input_ids": ids, "sampling_params": sampling, **where}
        urls = [self.household.parts[name].url for name in (p, d)]
        _, answer = await asyncio.gather(*(generate(http, url, body) for url in urls))
        return list(answer["output_ids"])


COUNTED = ["prompt_tokens", "cached_tokens", "prefill_steps", "steps", "retractions", "recomputed", "retried"]
COUNTED += ["kv_transfers", "kv_sent_bytes", "posts", "posts_of_followers", "kv_checksum_verified"]
COUNTED += ["resumed_computed", "resumed_through_prefill"]


def _grown(before: dict[str, float], after: dict[str, float]) -> dict[str, int]:
    grown = {name: int(after.get(name, 0) - before.get(name, 0)) for name in COUNTED if name in after}
    return {name: count for name, count in grown.items() if count}


def _unlike(p: dict[str, int], d: dict[str, int], prefill: Shape, decode: Shape) -> list[str]:
    """What the counters say against the cell."""
    through = d.get("resumed_through_prefill", 0)
    wanted = {
        "every prompt's KV came from prefill": p.get("kv_transfers", 0) == PROMPTS + through,
        "checksums of all transfers agree": d.get("kv_checksum_verified", 0) == PROMPTS + through,
        "decode computed no prompt": not d.get("prefill_steps", 0) and not d.get("resumed_computed", 0),
        "retracted, and through prefill, if tight": (through > 0) == decode.tight == (d.get("retractions", 0) > 0),
        "nothing was sent twice": not d.get("retried", 0),
        "followers wrote": _one_source(prefill, decode) or (p.get("posts_of_followers", 0) > 0) == (prefill.ranks > 1),
    }
    return [text for text, holds in wanted.items() if not holds]


def _one_source(prefill: Shape, decode: Shape) -> bool:
    """One KV head, which all ranks have, and one decode rank, which takes it from the leader or from the follower."""
    return prefill.model == "recall" and decode.tp == 1


def run(backend: str, subject: Subject, path: Path) -> int:
    """Every pair that fits; return how many failed. Pairs of tiny models are a part of the report of their own."""
    part = "shapes" if subject.name == RECALL else "group_shapes"
    rows, fleet, room = Rows(path, part), Fleet(backend, subject), 1000
    prefills, decodes = shapes_of(subject.name)
    try:
        for role, shapes in (("prefill", prefills), ("decode", decodes)):
            for shape in shapes:
                fleet.begin(role, shape)
        fleet.await_all()
        for prefill in prefills:
            for decode in (shape for shape in decodes if prefill.fits(shape)):
                found = asyncio.run(fleet.cell(prefill, decode, room=room))
                rows.add(f"{prefill.name} -> {decode.name}, {backend}", found)
                room += PROMPTS
        fleet.household.show_logs()
    finally:
        if left := fleet.household.close():
            print(f"left behind: {left}", file=sys.stderr)
    return rows.num_failed


def main() -> int:
    parser = rank_parser("shapes", "pairs of shapes")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--subjects", nargs="+", choices=(RECALL, *TINY), default=(RECALL, *TINY))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-shapes-") as folder:
        subjects = [Subject(RECALL) if name == RECALL else tiny(name, Path(folder)) for name in args.subjects]
        failed = [run(backend, subject, args.report) for subject in subjects for backend in args.backends]
    return 1 if any(failed) else 0


if __name__ == "__main__":
    sys.exit(main())
