"""Schemathesis at the doors of a real cluster: router, prefill and decode worker, as their `/openapi.json` describes them.

After each part right answers cross the cluster, all memory and rooms are back, and no process holds more than before.
"""

import asyncio
import contextlib
import os
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
from tqdm import tqdm

from tests.e2e.client import assert_all_back, generate_all
from tests.e2e.cluster import Cluster, cluster
from tests.e2e.workload import recall_body
from tests.transfer.rig import until
from tools.fuzz.footprint import Footprint, assert_no_leak, footprint, note_life, told

DOORS = ("router", "prefill", "decode")
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,unsupported_method"
)
# A profile is written where an admin says, not where a fuzzer says; roles stay; nobody opens groups of trainers. The others stop generation, and come last.
LAST = "pause|continue_generation|update_weights|memory_occupation"
CONTINUES = ("/continue_generation", "/resume_memory_occupation")
SERVES_S = 20.0  # until the router has noticed
NEVER = "profile|workers|switch_role|update_group"
FLAGS = ("--max-total-tokens", "16384", "--context-length", "256", "--log-level", "warning")
GROWTH_MIB = 64.0  # of one process from the first part on: caches with a bound fill up
# A scheduler's bf16 kernels: oneDNN keeps one for each number of tokens it has met, the last 1024 of them.
SCHEDULER_GROWTH_MIB = 512.0
SLACK = 40  # connections that are kept for a while
NUM_SERVED, WARM_ROUNDS = 16, 12
EXAMPLES = 60  # most for an operation
# Of schemathesis, which runs apart from our packages. A room waits for its peer for 300 s, longer than schemathesis waits.
HOOK = """
import schemathesis

@schemathesis.hook
def before_call(_context, case, **_):
    if isinstance(case.body, dict) and isinstance(case.body.get("bootstrap_room"), int):
        case.body["bootstrap_room"] = None
"""
_GENERATED = re.compile(r"(\d+) generated, (.+)")
_CASE = b'"status_code"'


class Refuted(AssertionError):
    """A door did not do as it says, or the cluster was not the same afterwards."""


@dataclass(frozen=True)
class Cases:
    """What schemathesis, a command, draws."""

    schemathesis: Path
    seed: int

    def command(self, url: str, selection: Sequence[str]) -> list[str]:
        words = f"run {url}/openapi.json --phases coverage,fuzzing -n {EXAMPLES} --seed {self.seed} -c {CHECKS}"
        return [str(self.schemathesis.absolute()), *words.split(), "--request-timeout", "30", *selection]


@dataclass(frozen=True)
class Doors:
    """A cluster to be fuzzed. `warm`: what each of its processes held once it had served."""

    cluster: Cluster
    folder: Path
    processes: dict[str, psutil.Process]
    warm: dict[str, Footprint]
    cases: Cases

    def url(self, door: str) -> str:
        return self.cluster.router if door == "router" else self.cluster.of(door)[0].url


@contextlib.contextmanager
def doors(cases: Cases) -> Iterator[Doors]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with cluster(folder, *FLAGS, "--run-dir", f"{folder}/logs") as c:
            for number in range(WARM_ROUNDS):  # other prompts each time, until every page has been used once
                _serve_well(c, seed=number)
            processes = dict(_processes(c))
            yield Doors(c, folder, processes, {name: footprint(p) for name, p in processes.items()}, cases)


def _processes(c: Cluster) -> Iterator[tuple[str, psutil.Process]]:
    roles = {worker.pid: worker.role for worker in c.workers}
    for process in psutil.Process(c.launcher.pid).children(recursive=True):
        words = " ".join(process.cmdline())
        if process.pid in roles:
            yield f"{roles[process.pid]} frontend", process
        elif process.ppid() in roles:
            yield f"{roles[process.ppid()]} scheduler", process
        elif " router " in words:
            yield "router", process


def fuzz_door(at: Doors, door: str, bar: "tqdm[Any]") -> str:
    """One door, except for what stops generation."""
    selection = ("--exclude-path-regex", f"{LAST}|{NEVER}")
    said = _run(at.cases.command(at.url(door), selection), at.folder / door, bar)
    return f"{said}; {_same_as_before(at)}"


def fuzz_control(at: Doors, bar: "tqdm[Any]") -> str:
    """What stops and continues generation, at all doors."""
    said = []
    for door in DOORS:
        command = at.cases.command(at.url(door), ("--include-path-regex", LAST))
        said.append(f"{door} {_run(command, at.folder / f'{door}-control', bar)}")
    _continue(at.cluster)
    return f"{', '.join(said)}; {_same_as_before(at)}"


def _run(command: Sequence[str], kept: Path, bar: "tqdm[Any]") -> str:
    """Its progress is read from the log of cases that it writes."""
    log, output, before = kept.with_suffix(".ndjson"), kept.with_suffix(".out"), bar.n
    kept.with_name("without_rooms.py").write_text(HOOK)
    with output.open("wb") as out:
        run = subprocess.Popen(
            [*command, "--report", "ndjson", "--report-ndjson-path", str(log)],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(kept.parent), "SCHEMATHESIS_HOOKS": "without_rooms"},
            cwd=kept.parent,
        )
        try:
            while run.poll() is None:
                _follow(log, bar, before)
                time.sleep(0.5)
        finally:
            run.kill()
            run.wait()
    found = _GENERATED.search(output.read_text())
    if run.returncode or found is None:
        raise Refuted(f"{' '.join(command)}\n{output.read_text()[-8000:]}")
    bar.update(before + int(found[1]) - bar.n)
    return found[2]


def _follow(log: Path, bar: "tqdm[Any]", before: int) -> None:
    seen = log.read_bytes().count(_CASE) if log.exists() else 0
    if before + seen > bar.n:
        note_life()
    bar.update(max(0, before + seen - bar.n))


def _same_as_before(at: Doors) -> str:
    _serve_well(at.cluster)
    logs = "".join(path.read_text() for path in (at.folder / "logs").iterdir())
    if "internal error" in logs or "a bug in the router" in logs:
        raise Refuted(logs[-3000:])
    after = {
        name: assert_no_leak(process, at.warm[name], growth_mib=_growth_mib(name), slack=SLACK, name=name)
        for name, process in at.processes.items()
    }
    return told(at.warm, after)


def _growth_mib(name: str) -> float:
    return SCHEDULER_GROWTH_MIB if name.endswith("scheduler") else GROWTH_MIB


def _continue(c: Cluster) -> None:
    for path in CONTINUES:
        answer = httpx.post(f"{c.router}{path}", timeout=60)
        if answer.status_code != 200:
            raise Refuted(f"generation does not continue: {path} answers {answer.text}")
    until(
        lambda: httpx.get(f"{c.router}/health").status_code == 200, timeout_s=SERVES_S, what="the router serves again"
    )


def _serve_well(c: Cluster, seed: int = 0) -> None:
    rng = random.Random(seed)
    drawn = [recall_body(rng, rng.randint(5, 120), max_new_tokens=3) for _ in range(NUM_SERVED)]
    answers = asyncio.run(generate_all(c.router, [body for body, _ in drawn]))
    if [answer["output_ids"] for answer in answers] != [wanted for _, wanted in drawn]:
        raise Refuted("the cluster does not answer rightly any more")
    asyncio.run(assert_all_back(c))
