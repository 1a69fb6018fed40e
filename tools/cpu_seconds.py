"""CPU seconds of tests by folder, file and test: a plugin of pytest, because on a shared machine the clock says little.

usage: python -m pytest -p tools.cpu_seconds [--cpu-seconds FILE] [-n 2 --dist loadscope ...] [tests/FOLDER ...]

A test's seconds are those of the test process and of all that came from it: between two phases (set up, call, tear down) all
that was used is the second one's. What a fixture of a file or a folder costs is its first or last test's. A process that
outlives its parent is lost from the count.

CPU seconds are not alike everywhere: another CPU, other work on the same caches or on the other half of a core changes them.
So each test process runs a fixed loop of some milliseconds after every `EVERY_S` CPU seconds: its mean CPU time says how fast
the CPUs were for this run, and its time on the clock how long a process waited for one (tools/durations.py). --cpu-seconds
writes all figures to FILE, and no tables.
"""

import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

COMPILED = Path(__file__).parents[1] / ".build/triton"  # what tests have compiled in this clone
MOST_FILES, MOST_TESTS = 150, 60
TICKS = os.sysconf("SC_CLK_TCK")
EVERY_S, LOOP_TURNS = 2.0, 60_000
UTIME, CSTIME = 11, 14  # of what follows the name in /proc/PID/stat; between them stime and cutime


class Meter:
    """CPU seconds since it was asked last."""

    def __init__(self) -> None:
        self._before_s = used_s()

    def read_s(self) -> float:
        before_s, self._before_s = self._before_s, used_s()
        return self._before_s - before_s


def used_s() -> float:
    """Of this process, of its children that have ended, and of all descendants that live and theirs."""
    ended = os.times()
    return time.process_time() + ended.children_user + ended.children_system + sum(map(_used_s, _children(os.getpid())))


def _used_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it has ended, and its parent's count has it
    return sum(map(int, fields[UTIME : CSTIME + 1])) / TICKS + sum(map(_used_s, _children(pid)))


def _children(pid: int) -> Iterator[int]:
    for thread in _threads(pid):
        try:
            yield from map(int, (thread / "children").read_text().split())
        except OSError:
            continue


def _threads(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def timed_loop() -> tuple[float, float]:
    """CPU seconds of a fixed piece of work in plain Python, and its seconds on the clock."""
    began_s, began_cpu_s, total = time.perf_counter(), time.thread_time(), 0
    for i in range(LOOP_TURNS):
        total += i * i % 7
    return time.thread_time() - began_cpu_s, time.perf_counter() - began_s


meter = Meter()
is_first = not COMPILED.exists()  # nothing is compiled yet
spent_s: Counter[str] = Counter()  # by test; "": collections
unmeasured_s = 0.0  # CPU seconds that tests have used since the last loop
loops_s: list[tuple[float, float]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", type=Path, metavar="FILE", help="write CPU seconds by test to FILE, no tables")


def pytest_collection_finish() -> None:
    spent_s[""] += meter.read_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Any:
    global unmeasured_s
    report = yield
    report.cpu_s, report.collection_s, report.loops_s = meter.read_s(), spent_s.pop("", 0.0), []
    unmeasured_s += report.cpu_s
    if unmeasured_s >= EVERY_S:
        unmeasured_s = 0.0
        report.loops_s.append(timed_loop())
        meter.read_s()
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    spent_s[report.nodeid] += report.cpu_s  # type: ignore[attr-defined]
    spent_s[" collection"] += report.collection_s  # type: ignore[attr-defined]
    loops_s.extend(report.loops_s)  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if file := config.getoption("--cpu-seconds"):
        write(file, is_whole=config.args_source.name != "ARGS" and not config.option.keyword, status=exitstatus)
    else:
        print_tables(terminalreporter)


def file_of(test: str) -> str:
    return test.partition("::")[0]


def folder_of(test: str) -> str:
    """The folder of tests/ that a test or file is of."""
    return "/".join(file_of(test).split("/")[:2])


def added_up(tests_s: Mapping[str, float], by: Callable[[str], str]) -> Counter[str]:
    total_s = Counter[str]()
    for test, seconds in tests_s.items():
        total_s[by(test)] += seconds  # type: ignore[assignment]
    return total_s


def write(file: Path, *, is_whole: bool, status: int) -> None:
    loop_s, clock_s = (statistics.fmean(column) for column in zip(*loops_s, strict=True)) if loops_s else (0.0, 0.0)
    run = {"is_whole": is_whole, "is_first": is_first, "status": status, "num_loops": len(loops_s)}
    run |= {"loop_s": loop_s, "loop_clock_s": clock_s}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**run, "tests_s": spent_s}))


def print_tables(terminalreporter: Any) -> None:
    folders, files = added_up(spent_s, folder_of), added_up(spent_s, file_of)
    for name, found, most in (("folder", folders, None), ("file", files, MOST_FILES), ("test", spent_s, MOST_TESTS)):
        terminalreporter.section(f"CPU seconds by {name}: {sum(found.values()):.0f}")
        for key, seconds in found.most_common(most):
            terminalreporter.write_line(f"{seconds:8.1f}  {key}")
