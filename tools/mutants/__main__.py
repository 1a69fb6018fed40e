"""`make mutants`, `make sim-mutants`: plants each bug in a process of its own and demands that it is found.

usage: python -m tools.mutants TABLE [--only TEXT] [--jobs 2] [--report FILE]

The core's bugs are for the stories of tests/core/proof, the cluster's for the fixed seeds and scenarios of
tools/simulation, others for the tests that their table names. A bug that survives means that the proof does not look there:
status 1, and its name.
"""

import argparse
import importlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.mutants.planting import ROOT, TABLES, Bug, OutOfDate, bugs_of
from tools.progress import progress

FOUND = 1
OUT_OF_DATE = 70
CPU_LIMIT_S = 720  # a bug may also show by a run that has no end; not by the clock, as others may load the machine
LIMIT_S = 3.0 * CPU_LIMIT_S  # by the clock, for a run that waits for ever


def look_with(table: str, bug: Bug) -> int:
    """Plant one bug here; the exit status says whether it was found, the last line what was."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, resource.RLIM_INFINITY))
    try:
        bug.plant()
    except OutOfDate as error:
        print(error, file=sys.stderr)
        return OUT_OF_DATE
    finding = importlib.import_module("tools.mutants.finding")
    logging.disable(logging.WARNING)  # the roles say which transfer failed
    found = finding.look(table)
    if bug.explains(found):
        print(found, file=sys.stderr)
        return OUT_OF_DATE
    print(found[:400].replace("\n", " "))
    return FOUND if found else 0


def find(table: str, name: str) -> str:
    """The error by which a bug shows in a process of its own; "" when it does not."""
    command = [sys.executable, "-m", "tools.mutants", table, "--plant", name]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return "no end"
    if done.returncode == -signal.SIGXCPU:
        return "no end"
    if done.returncode not in (0, FOUND) or not done.stdout:
        why = "the bug is out of date" if done.returncode == OUT_OF_DATE else f"status {done.returncode}"
        raise RuntimeError(f"{name!r}: {why}: {done.stderr[-2000:]}")
    return done.stdout.strip().splitlines()[-1] if done.returncode == FOUND else ""


def find_all(table: str, only: str, jobs: int) -> dict[str, dict[str, object]]:
    """Name of a bug -> what it does, the error that found it, and how long that took. `jobs`: bugs at a time."""
    chosen = [bug for name, bug in bugs_of(table).items() if only in name]

    def one(bug: Bug) -> dict[str, object]:
        started_s = time.monotonic()
        error = find(table, bug.name)
        bar.write(f"{'found' if error else 'SURVIVED'}: {bug.name}: {error[:160]}")
        bar.update(1)
        return {"what": bug.what, "found": error[:160], "seconds": round(time.monotonic() - started_s, 1)}

    with progress(len(chosen), unit="bug") as bar, ThreadPoolExecutor(jobs) as pool:
        return dict(zip((bug.name for bug in chosen), pool.map(one, chosen), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--only", default="", help="bugs with this text in their name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="bugs at a time")
    parser.add_argument("--report", type=Path, default=None)
    parser.add_argument("--plant", default=None, help="look for this bug in this process")
    args = parser.parse_args()
    if args.plant is not None:
        return look_with(args.table, bugs_of(args.table)[args.plant])
    report = find_all(args.table, args.only, args.jobs)
    survived = [name for name, entry in report.items() if not entry["found"]]
    print(f"{len(report) - len(survived)} of {len(report)} planted bugs found")
    if args.report is not None:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(json.dumps(report, indent=2) + "\n")
    return int(bool(survived) or not report)


if __name__ == "__main__":
    sys.exit(main())
