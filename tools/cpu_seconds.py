"""CPU seconds of tests by folder, file and test: a plugin of pytest, because on a shared machine the clock says little.

usage: python -m pytest -p tools.cpu_seconds [-n 2 --dist loadscope ...] [tests/FOLDER ...]

A test's seconds are those of the test process and of all that came from it: between two phases (set up, call, tear down) all
that was used is the second one's. What a fixture of a file or a folder costs is its first or last test's. A process that
outlives its parent is lost from the count.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MOST_FILES, MOST_TESTS = 150, 60
TICKS = os.sysconf("SC_CLK_TCK")
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


meter = Meter()
spent_s: Counter[str] = Counter()  # by test; "": collections


def pytest_collection_finish() -> None:
    spent_s[""] += meter.read_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Any:
    report = yield
    report.cpu_s, report.collection_s = meter.read_s(), spent_s.pop("", 0.0)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    spent_s[report.nodeid] += report.cpu_s  # type: ignore[attr-defined]
    spent_s[" collection"] += report.collection_s  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    files, folders = Counter[str](), Counter[str]()
    for test, seconds in spent_s.items():
        file = test.partition("::")[0]
        files[file] += seconds  # type: ignore[assignment]
        folders["/".join(file.split("/")[:2])] += seconds  # type: ignore[assignment]
    for name, found, most in (("folder", folders, None), ("file", files, MOST_FILES), ("test", spent_s, MOST_TESTS)):
        terminalreporter.section(f"CPU seconds by {name}: {sum(found.values()):.0f}")
        for key, seconds in found.most_common(most):
            terminalreporter.write_line(f"{seconds:8.1f}  {key}")
