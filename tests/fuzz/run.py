"""`make fuzz`: fuzzed frames, bootstrap calls and HTTP until enough inputs have been seen; figures to a report.

    python -m tests.fuzz.run --inputs 100000 --schemathesis .venv-fuzz/bin/schemathesis --report docs/reports/fuzz.md

Exits 1, and shows the smallest input that does it, for the first crash, hang, leak or answer that is not as described.
"""

import argparse
import asyncio
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import psutil
from hypothesis import HealthCheck, given, seed, settings
from tqdm import tqdm

from tests.e2e.client import assert_all_back, generate_all
from tests.e2e.cluster import Cluster, cluster
from tests.e2e.workload import recall_body
from tests.fuzz.bodies import CALLS, called_server
from tests.fuzz.frames import STORIES, Steps, Story

ROUND = settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
FRAME_SHARE = 0.8
MAX_GROWTH_MIB = 48  # of this process from the first tenth on; hypothesis keeps something of its own
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,unsupported_method"
)
# A profile is written where an admin says: not where a fuzzer says. The others stop generation, and come last.
LAST = "pause|continue_generation|update_weights"
NEVER = "profile|workers"
_GENERATED = re.compile(r"(\d+) generated, (.+)")


@dataclass(frozen=True)
class Line:
    """One row of the report."""

    what: str
    inputs: int
    seconds: float
    result: str


def main() -> int:
    args = _arguments()
    frames = int(args.inputs * FRAME_SHARE)
    lines = [fuzz_frames(frames, args.seed), fuzz_bodies(args.inputs - frames, args.seed)]
    if args.schemathesis is not None:
        lines += fuzz_http(args.schemathesis, args.examples)
    text = report(lines, args.seed)
    print(text)
    if args.report is not None:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(text)
    return 0


def fuzz_frames(inputs: int, first_seed: int) -> Line:
    taken = 0

    def one_round(number: int, bar: "tqdm[None]") -> None:
        @seed(number)
        @ROUND
        @given(STORIES)
        def run(steps: Steps) -> None:
            nonlocal taken
            story = Story()
            story.run(steps)
            taken += story.num_taken
            bar.update(story.num_frames)

        run()

    line = _until(inputs, first_seed, "frames", one_round)
    return Line("control-plane frames, both ends", line.inputs, line.seconds, f"{taken} were messages; {line.result}")


def fuzz_bodies(inputs: int, first_seed: int) -> Line:
    with called_server() as caller:

        def one_round(number: int, bar: "tqdm[None]") -> None:
            @seed(number)
            @ROUND
            @given(CALLS)
            def run(calls: list[tuple[tuple[str, str], str, bytes]]) -> None:
                caller.run(calls)
                bar.update(len(calls))

            run()

        line = _until(inputs, first_seed, "bootstrap calls", one_round)
        statuses = ", ".join(f"{count} x {status}" for status, count in sorted(caller.statuses.items()))
        return Line("bootstrap server, HTTP", line.inputs, line.seconds, f"{statuses}; {line.result}")


def _until(inputs: int, number: int, what: str, one_round: Callable[[int, "tqdm[None]"], None]) -> Line:
    """Rounds until so many inputs were seen; memory must not grow once the first tenth has warmed everything up."""
    process, started_s, warm = psutil.Process(), time.monotonic(), 0.0
    with tqdm(total=inputs, desc=what, unit="", disable=None) as bar:
        while bar.n < inputs:
            one_round(number, bar)
            number += 1
            if not warm and bar.n >= inputs / 10:
                warm = process.memory_info().rss / 2**20
    growth = process.memory_info().rss / 2**20 - warm
    assert growth < MAX_GROWTH_MIB, f"{what}: memory has grown by {growth:.0f} MiB"
    return Line(what, bar.n, time.monotonic() - started_s, f"memory {growth:+.1f} MiB")


def fuzz_http(schemathesis: Path, examples: int) -> list[Line]:
    """Router, prefill and decode worker of a real cluster; afterwards it answers rightly and all memory is back."""
    with tempfile.TemporaryDirectory() as folder:
        args = (
            "--max-total-tokens",
            "16384",
            "--context-length",
            "256",
            "--log-level",
            "warning",
            "--run-dir",
            f"{folder}/logs",
        )
        with cluster(Path(folder), *args) as c:
            doors = [("router", c.router), *((w.role, w.url) for w in c.workers)]
            lines = [
                _door(schemathesis, name, url, examples, "--exclude-path-regex", f"{LAST}|{NEVER}")
                for name, url in doors
            ]
            lines += [
                _door(schemathesis, f"{name}, control", url, examples, "--include-path-regex", LAST)
                for name, url in doors
            ]
            assert httpx.post(f"{c.router}/continue_generation").status_code == 200
            _serves_well(c)
            logs = "".join(path.read_text() for path in (Path(folder) / "logs").iterdir())
            assert "internal error" not in logs and "a bug in the router" not in logs, logs[-3000:]
            return lines


def _door(schemathesis: Path, name: str, url: str, examples: int, *selection: str) -> Line:
    command = [str(schemathesis), "run", f"{url}/openapi.json", "--phases", "coverage,fuzzing", "-n", str(examples)]
    command += ["-c", CHECKS, "--request-timeout", "30", *selection]
    started_s = time.monotonic()
    print(f"schemathesis: {name}", flush=True)
    run = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONPATH": ""}
    )
    found = _GENERATED.search(run.stdout)
    if run.returncode or found is None:
        sys.exit(f"{' '.join(command)}\n{run.stdout[-8000:]}")
    return Line(f"{name}, HTTP (schemathesis)", int(found[1]), time.monotonic() - started_s, found[2])


def _serves_well(c: Cluster) -> None:
    rng = random.Random(1)
    drawn = [recall_body(rng, rng.randint(5, 60), max_new_tokens=3) for _ in range(8)]
    answers = asyncio.run(generate_all(c.router, [body for body, _ in drawn]))
    assert [answer["output_ids"] for answer in answers] == [wanted for _, wanted in drawn]
    asyncio.run(assert_all_back(c))


def report(lines: list[Line], first_seed: int) -> str:
    rows = [f"| {line.what} | {line.inputs:,} | {line.seconds:.0f} | {line.result} |" for line in lines]
    total = sum(line.inputs for line in lines)
    head = [
        "# Fuzzing",
        "",
        f"Written by `make fuzz` (first seed {first_seed}). {total:,} inputs; none crashed, hung or leaked. What an input is,",
        "and what is demanded after it: `tests/fuzz/frames.py`, `tests/fuzz/bodies.py`, `tests/fuzz/run.py`.",
        "",
        "| what | inputs | seconds | result |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="fuzz the control plane, the bootstrap server and every HTTP door")
    parser.add_argument("--inputs", type=int, default=100_000, help="frames and bootstrap calls together")
    parser.add_argument("--examples", type=int, default=60, help="most examples schemathesis draws for an operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schemathesis", type=Path, help="its command; without it HTTP is left out")
    parser.add_argument("--report", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
