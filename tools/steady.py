"""`make steady-tests`: the whole suite under four conditions, twice each; writes docs/reports/steady_tests.json.

Conditions: the machine alone, beside four busy loops, on one core, and with late sleeps (tools/late_sleeps.py).
A run is kept in the report as soon as it ends, with its failures; runs of another commit are dropped.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deploy.bench.environment import describe

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "docs/reports/steady_tests.json"
SUITE = ("-m", "pytest", "-q", "-n", "4", "--dist", "loadscope", "--no-loadscope-reorder")
NUM_LOOPS = 4
ONE_CORE = ("taskset", "-c", str(min(os.sched_getaffinity(0))))

# By condition: what stands before the command, how many busy loops run beside it, and more arguments of pytest.
CONDITIONS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "alone": ((), 0, ()),
    "busy": ((), NUM_LOOPS, ()),
    "one-core": (ONE_CORE, 0, ()),
    "late-sleeps": ((), 0, ("-p", "tools.late_sleeps")),
}


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_suite(condition: str, tests: list[str]) -> dict[str, Any]:
    """Run the suite once. Returns its counts, its seconds and the names of the tests that failed."""
    before, num_loops, more = CONDITIONS[condition]
    with tempfile.TemporaryDirectory() as folder, busy_loops(num_loops):
        results = Path(folder) / "results.xml"
        begun_s = time.monotonic()
        status = subprocess.call(
            [*before, sys.executable, *SUITE, *more, f"--junitxml={results}", *tests],
            cwd=ROOT,
        )
        seconds = round(time.monotonic() - begun_s)
        if not results.exists():
            return {"seconds": seconds, "num_tests": 0, "failed": [f"pytest ended with status {status}"]}
        return {"seconds": seconds, **read_results(results)}


def read_results(results: Path) -> dict[str, Any]:
    """Counts and failures from JUnit XML of pytest."""
    cases = list(ElementTree.parse(results).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {
        "num_tests": len(cases),
        "num_skipped": sum(case.find("skipped") is not None for case in cases),
        "failed": sorted({f"{case.get('classname')}::{case.get('name')}" for case in failed}),
    }


def clean_commit() -> str:
    """The commit of the tree. Raises SystemExit where something differs from it besides reports, which runs write."""
    git = ("git", "-C", str(ROOT))
    changes = subprocess.check_output([*git, "status", "--porcelain", "-uno", "--", ".", ":!docs/reports"], text=True)
    if changes:
        raise SystemExit(f"steady-tests: commit first, as the report names the commit:\n{changes}")
    return subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True).strip()


def runs_of(commit: str) -> dict[str, list[dict[str, Any]]]:
    """Read the runs of this commit that the report has already, by condition."""
    report = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    return dict(report["runs"]) if report.get("about", {}).get("commit") == commit else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--runs", type=int, default=2, help="runs under each condition")
    parser.add_argument(
        "tests", nargs="*", help="folders or files; the whole suite by default, which alone is reported"
    )
    args = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {}
    about = {**describe(), "command": "make steady-tests"}
    if not args.tests:
        about["commit"] = commit = clean_commit()
        runs = runs_of(commit)
    failed = 0
    for condition in args.conditions:
        while len(done := runs.setdefault(condition, [])) < args.runs:
            print(f"{condition}: run {len(done) + 1} of {args.runs}", flush=True)
            done.append(run_suite(condition, args.tests))
            failed += len(done[-1]["failed"])
            print(f"{condition}: {done[-1]}", flush=True)
            if not args.tests:
                REPORT.write_text(json.dumps({"about": about, "runs": runs}, indent=1) + "\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
