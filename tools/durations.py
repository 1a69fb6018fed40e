"""`make test`, at its end: fails when a folder of tests has used more CPU seconds than its budget and a quarter.

usage: python -m tools.durations [--write]     --write: the last whole run becomes the budget (tests/durations.toml)

Budgets are CPU seconds, child processes among them, not time on the clock: a run beside other work waits longer, but computes
the same. They are not shares of the suite's total: two folders that grow together would hide each other. Machines differ, so
a run measures how long a fixed loop takes between its tests, and its seconds are divided by that (tools/cpu_seconds.py). The
loop is plain Python in the nearest caches. It stands neither for kernels on another kind of CPU nor for processes that other
work throws out of the caches (up to 30 % more beside 20 busy processes). So a run is compared, but fails nothing, on a CPU of
another name, if the loop took `SPEED` times as long or as short ("AMD EPYC" names kinds 1.85 times apart), or if a process
waited for a core `BUSY` times as long. A neighbour on the host slows all folders alike and the loop hardly (one suite took
15 % more, 5 to 23 % by folder): the median of the larger folders is taken off, up to `DRIFT`. A folder may exceed its budget
by `NOISE_S`. Budgets are of a clean clone with empty caches, as CI has them.
"""

import argparse
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from deploy.bench.environment import describe
from tools.cpu_seconds import added_up, file_of, folder_of

ROOT = Path(__file__).parents[1]
BUDGETS = ROOT / "tests/durations.toml"
MEASURED = ROOT / ".build/cpu_seconds.json"
QUARTER = 1.25
NOISE_S = 2.0
DRIFT = 1.3
LARGE_S = 5.0  # a folder whose seconds say how slow the machine is
UNKNOWN_S = 2.0  # of a file in a folder without a row
LONG_S = 3.0  # a file of tests that takes longer has a row, for the estimates of tools/quick.py
BUSY, SPEED = 1.5, 1.25
SPARE = 0.8  # share of its budget below which a folder's budget should fall
HEADER = """\
# CPU seconds of the suite, child processes among them. `make test` fails when a folder exceeds its budget by a quarter
# (tools/durations.py); `python -m tools.durations --write` writes this file from the last whole run.
"""


@dataclass(frozen=True)
class Budgets:
    """tests/durations.toml: CPU seconds, and the CPU, the loop's time and the share of waiting of the run that they are of."""

    cpu: str
    loop_s: float
    clock_per_cpu_second: float
    folders_s: Mapping[str, float]
    files_s: Mapping[str, float]  # of the long ones

    def estimates(self, files: Collection[str]) -> dict[str, float]:
        """CPU seconds by test file: its own row, or an equal share of what the rows of its folder leave."""
        short = Counter(folder_of(path) for path in files if path not in self.files_s)
        left_s = {folder: self.folders_s.get(folder, UNKNOWN_S * number) for folder, number in short.items()}
        for path, seconds in self.files_s.items():
            if (folder := folder_of(path)) in left_s:
                left_s[folder] -= seconds
        share_s = {folder: max(left_s[folder], 0.0) / number for folder, number in short.items()}
        return {path: self.files_s.get(path) or share_s[folder_of(path)] for path in files}


def read_budgets(file: Path = BUDGETS) -> Budgets:
    found = tomllib.loads(file.read_text())
    return Budgets(*(found[name] for name in ("cpu", "loop_s", "clock_per_cpu_second", "folders", "files")))


def findings(budgets: Budgets, folders_s: Mapping[str, float], loop_s: float) -> Iterator[str]:
    """Folders above their budgets, in the seconds of the budgets' machine."""
    slower = drift(budgets, folders_s, loop_s)
    for folder, seconds in sorted(folders_s.items()):
        taken_s, budget_s = seconds * budgets.loop_s / loop_s / slower, budgets.folders_s.get(folder, 0.0)
        if taken_s > max(QUARTER * budget_s, budget_s + NOISE_S):
            yield f"{folder}: {taken_s:.1f} CPU s, its budget is {budget_s:.1f} (tests/durations.toml)"


def drift(budgets: Budgets, folders_s: Mapping[str, float], loop_s: float) -> float:
    """How many times as long the larger folders took, at their median: 1 to `DRIFT`."""
    large = {folder: budget_s for folder, budget_s in budgets.folders_s.items() if budget_s >= LARGE_S}
    ratios = [folders_s[f] * budgets.loop_s / loop_s / budget_s for f, budget_s in large.items() if f in folders_s]
    return min(max(1.0, median(ratios)), DRIFT) if len(ratios) > 2 else 1.0


def spare(budgets: Budgets, folders_s: Mapping[str, float], loop_s: float) -> list[str]:
    """Folders that need much less than their budgets."""
    taken_s = {folder: folders_s.get(folder, 0.0) * budgets.loop_s / loop_s for folder in budgets.folders_s}
    return [f for f, budget_s in budgets.folders_s.items() if taken_s[f] < min(SPARE * budget_s, budget_s - NOISE_S)]


def dump(cpu: str, run: Mapping[str, Any]) -> str:
    """tests/durations.toml for a measured run."""
    folders_s, files_s = added_up(run["tests_s"], folder_of), added_up(run["tests_s"], file_of)
    files_s = {file: seconds for file, seconds in files_s.items() if seconds > LONG_S and file not in folders_s}
    lines = [HEADER, f'cpu = "{cpu}"', f"loop_s = {run['loop_s']:.5f}", f"clock_per_cpu_second = {waited(run):.2f}"]
    lines.append(f"total = {sum(folders_s.values()):.0f}")
    for table, rows in (("folders", folders_s), ("files", files_s)):
        lines += ["", f"[{table}]", *(f'"{key}" = {seconds:.1f}' for key, seconds in sorted(rows.items()))]
    return "\n".join(lines) + "\n"


def waited(run: Mapping[str, Any]) -> float:
    """Seconds on the clock for each CPU second of a process that only computes."""
    return float(run["loop_clock_s"] / run["loop_s"])


def is_comparable(budgets: Budgets, cpu: str, run: Mapping[str, Any]) -> bool:
    """Whether this run was on the budgets' kind of CPU, as fast as theirs, and waited for it about as long."""
    is_as_fast = 1 / SPEED <= run["loop_s"] / budgets.loop_s <= SPEED
    return cpu == budgets.cpu and is_as_fast and waited(run) <= BUSY * budgets.clock_per_cpu_second


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.durations", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write tests/durations.toml")
    args = parser.parse_args()
    run, cpu = json.loads(MEASURED.read_text()), str(describe()["cpu"])
    if not run["is_whole"] or run["status"]:
        sys.exit(f"{MEASURED}: not of a whole suite that passed")
    if args.write and not run["is_first"]:
        sys.exit(
            "--write: a run before this one has compiled and imported: run `make test` in a new clone, and write its seconds"
        )
    if args.write:
        BUDGETS.write_text(dump(cpu, run))
    budgets, folders_s, loop_s = read_budgets(), added_up(run["tests_s"], folder_of), run["loop_s"]
    print(f"CPU seconds: {sum(folders_s.values()):.0f}; the fixed loop took {loop_s / budgets.loop_s:.2f} of its time")
    for folder in spare(budgets, folders_s, loop_s) if run["is_first"] else ():
        print(f"{folder} needs much less than its budget: python -m tools.durations --write")
    found = list(findings(budgets, folders_s, loop_s))
    print(*found, sep="\n", end="\n" if found else "")
    if is_comparable(budgets, cpu, run):
        sys.exit(1 if found else 0)
    print(
        f"not a run to fail: {cpu}, a loop of {1e3 * loop_s:.1f} ms, {waited(run):.1f} s on the clock for a CPU second; "
        f"the budgets' run: {budgets.cpu}, {1e3 * budgets.loop_s:.1f} ms, {budgets.clock_per_cpu_second:.1f} s"
    )


if __name__ == "__main__":
    main()
