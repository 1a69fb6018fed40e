"""`make mutants`, `make sim-mutants`: plants each bug in a process of its own and demands that it is found.

usage: python -m tools.mutants core|cluster|encoders|drafters|experts|states|rewinds|ways|prefixes [--only TEXT] [--report FILE]

The core's bugs are for the stories of tests/core/proof, the cluster's for the fixed seeds and scenarios of
tools/simulation, those of experts that move, of drafters, of states and prefixes that cross or go back, and of
the router's ways for tests of their own. A bug that survives means that the proof does not look there: status 1, and its name.
"""

import argparse
import json
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tqdm import tqdm

from tests.packages import ROOT
from tools.mutants import drafters, experts, prefixes, rewinds, states, ways
from tools.mutants.cluster import CLUSTER
from tools.mutants.core import CORE
from tools.mutants.drafts import DRAFTS
from tools.mutants.encoders import ENCODERS
from tools.mutants.image_sharing import IMAGE_SHARING
from tools.mutants.images import IMAGES
from tools.mutants.planting import BROKEN
from tools.mutants.ranks import RANKS
from tools.simulation.__main__ import encoder_outcomes, first_failure, fixed_outcomes
from tools.soak_core import drive_round

TABLES = {
    "core": {**CORE, **DRAFTS, **IMAGES},
    "cluster": {**CLUSTER, **RANKS, **IMAGE_SHARING},
    "encoders": ENCODERS,
    "drafters": drafters.DRAFTERS,
    "experts": experts.EXPERTS,
    "states": states.STATES,
    "rewinds": rewinds.REWINDS,
    "ways": ways.WAYS,
    "prefixes": prefixes.PREFIXES,
}
FINDERS = {
    "drafters": drafters.FINDERS,
    "experts": experts.FINDERS,
    "states": states.FINDERS,
    "rewinds": rewinds.FINDERS,
    "ways": ways.FINDERS,
    "prefixes": prefixes.FINDERS,
}
FOUND = 1
SEEDS, STEPS = (1, 2, 3), 60_000  # of the core's stories
LIMIT_S = 720.0  # a bug may also show by a run that does not end


def look(table: str) -> str:
    """What the proof of `table` finds in this process; "": nothing."""
    if table in FINDERS:
        return _look_by_tests(FINDERS[table])
    if table == "core":
        return _look_by_stories()
    return first_failure(encoder_outcomes() if table == "encoders" else fixed_outcomes())


def _look_by_tests(paths: Sequence[str]) -> str:
    failed = _FirstFailure()
    options = ("-q", "-x", "-p", "no:cacheprovider", "--assert=plain")
    status = pytest.main([*options, *(str(ROOT / path) for path in paths)], plugins=[failed])
    assert status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), f"pytest ends with {status!r}"
    return failed.error


class _FirstFailure:
    """A plugin of pytest that keeps where a test failed, and by which error."""

    error = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.error:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.error = f"{report.nodeid}: {report.longrepr if crash is None else crash.message}"


def _look_by_stories() -> str:
    for seed in SEEDS:
        number, steps = seed, 0
        while steps < STEPS:
            try:
                steps += drive_round(number, shrink=False)["steps"]
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            number += 1
    return ""


def look_with(table: str, name: str) -> int:
    """Plant one bug here; the exit status says whether it was found, the last line what was."""
    logging.disable(logging.WARNING)  # the roles say which transfer failed
    TABLES[table][name].plant()
    error = look(table)
    print(error[:400].replace("\n", " "))
    return FOUND if error else 0


def find(table: str, name: str) -> str:
    """The error by which a bug shows in a process of its own; "" when it does not."""
    command = [sys.executable, "-m", "tools.mutants", table, "--plant", name]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return "no end"
    if done.returncode not in (0, FOUND) or not done.stdout:
        why = "the bug is out of date" if done.returncode == BROKEN else f"status {done.returncode}"
        raise RuntimeError(f"{name!r}: {why}: {done.stderr[-2000:]}")
    return done.stdout.strip().splitlines()[-1] if done.returncode == FOUND else ""


def find_all(table: str, only: str) -> dict[str, dict[str, object]]:
    """Name of a bug -> what it does, the error that found it, and how long that took."""
    report: dict[str, dict[str, object]] = {}
    for bug in tqdm([bug for name, bug in TABLES[table].items() if only in name], unit="bug"):
        started_s = time.monotonic()
        error = find(table, bug.name)
        report[bug.name] = {"what": bug.what, "found": error[:160], "seconds": round(time.monotonic() - started_s, 1)}
        tqdm.write(f"{'found' if error else 'SURVIVED'}: {bug.name}: {error[:160]}")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--only", default="", help="bugs with this text in their name")
    parser.add_argument("--report", type=Path, default=None)
    parser.add_argument("--plant", default=None, help="look for this bug in this process")
    args = parser.parse_args()
    if args.plant is not None:
        return look_with(args.table, args.plant)
    report = find_all(args.table, args.only)
    survived = [name for name, entry in report.items() if not entry["found"]]
    print(f"{len(report) - len(survived)} of {len(report)} planted bugs found")
    if args.report is not None:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(json.dumps(report, indent=2) + "\n")
    return int(bool(survived) or not report)


if __name__ == "__main__":
    sys.exit(main())
