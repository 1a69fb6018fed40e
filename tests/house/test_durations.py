"""A folder of tests may exceed its budget of CPU seconds by a quarter, measured in the speed of the budgets' machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.packages import ROOT
from tools import durations
from tools.cpu_seconds import added_up, folder_of
from tools.durations import Budgets, dump, findings, is_comparable, read_budgets

CPU, LOOP_S = "a kind of CPU", 0.002
BUDGETS = Budgets(CPU, LOOP_S, 2.0, {"tests/core": 100.0, "tests/text": 5.0}, {})

# Children that have ended, that are still there at the end of a test, and one that a fixture of the file ends.
A_TEST = """
import subprocess, sys, time
import pytest

def burn(seconds):
    return subprocess.Popen([sys.executable, "-c", f"import time\\nwhile time.process_time() < {seconds}: pass"])

@pytest.fixture(scope="module")
def server():
    process = burn(0.2)
    process.wait()
    yield

def test_its_own():
    end_s = time.process_time() + 0.2
    while time.process_time() < end_s: pass

def test_a_child():
    burn(0.2).wait()

def test_a_fixture(server): ...
def test_nothing(server): ...
"""


def test_a_folder_fails_above_its_budget_and_a_quarter() -> None:
    assert not list(findings(BUDGETS, {"tests/core": 124.0, "tests/text": 6.9}, LOOP_S))
    assert list(findings(BUDGETS, {"tests/core": 126.0, "tests/text": 6.9}, LOOP_S)) == [
        "tests/core: 126.0 CPU s, its budget is 100.0 (tests/durations.toml)"
    ]
    found = list(findings(BUDGETS, {"tests/text": 7.1, "tests/new": 2.5}, LOOP_S))
    assert [finding.partition(":")[0] for finding in found] == ["tests/new", "tests/text"]


def test_a_neighbour_that_slows_all_folders_alike_fails_none() -> None:
    budgets = Budgets(CPU, LOOP_S, 2.0, {f"tests/{name}": 100.0 for name in "abcde"}, {})
    slow_s = dict(zip(budgets.folders_s, (115.0, 118.0, 120.0, 123.0, 130.0), strict=True))
    assert not list(findings(budgets, slow_s, LOOP_S))
    assert [f.partition(":")[0] for f in findings(budgets, {**slow_s, "tests/e": 155.0}, LOOP_S)] == ["tests/e"]
    assert len(list(findings(budgets, dict.fromkeys(budgets.folders_s, 165.0), LOOP_S))) == 5, "that is no neighbour"
    assert list(findings(budgets, {**dict.fromkeys(budgets.folders_s, 80.0), "tests/a": 126.0}, LOOP_S))


def test_only_a_run_at_the_same_speed_that_waited_as_little_may_fail() -> None:
    def run(wait: float, loop_s: float = LOOP_S) -> dict[str, float]:
        return {"loop_s": loop_s, "loop_clock_s": wait * loop_s}

    assert is_comparable(BUDGETS, CPU, run(2.9))
    assert not is_comparable(BUDGETS, CPU, run(3.1))
    assert not is_comparable(BUDGETS, "another kind", run(1.0))
    speeds = [speed for speed in (1 / 1.3, 1 / 1.2, 1.2, 1.3) if is_comparable(BUDGETS, CPU, run(2.0, speed * LOOP_S))]
    assert speeds == [1 / 1.2, 1.2], "one name may stand for two kinds of CPU"


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    tests_s = {"tests/core/test_a.py::test_x": 2.0, "tests/core/test_a.py::test_y[b]": 4.0, " collection": 20.0}
    file = tmp_path / "durations.toml"
    file.write_text(dump(CPU, {"tests_s": tests_s, "loop_s": LOOP_S, "loop_clock_s": 3 * LOOP_S}))
    folders_s = {" collection": 20.0, "tests/core": 6.0}
    assert read_budgets(file) == Budgets(CPU, LOOP_S, 3.0, folders_s, {"tests/core/test_a.py": 6.0})


def test_budgets_are_those_of_a_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"is_whole": True, "is_first": False, "status": 0, "tests_s": {}, "loop_s": LOOP_S, "loop_clock_s": LOOP_S}
    (tmp_path / "run.json").write_text(json.dumps(run))
    monkeypatch.setattr(durations, "MEASURED", tmp_path / "run.json")
    monkeypatch.setattr(durations, "BUDGETS", tmp_path / "durations.toml")
    monkeypatch.setattr(sys, "argv", ["durations", "--write"])
    with pytest.raises(SystemExit, match="in a new clone"):
        durations.main()
    assert not durations.BUDGETS.exists()


def test_the_committed_budgets_are_of_folders_that_are_there() -> None:
    folders = read_budgets().folders_s.keys() - {" collection"}
    assert folders and all((ROOT / folder).is_dir() for folder in folders)


def test_seconds_are_those_of_a_test_its_children_and_its_fixtures(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(A_TEST)
    out = tmp_path / "out/cpu.json"
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "tools.cpu_seconds"]
    command = [*pytest_, f"--cpu-seconds={out}", "-n", "1", "test_it.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run: dict[str, Any] = json.loads(out.read_text())
    tests_s = {name.rpartition("::")[2]: seconds for name, seconds in run["tests_s"].items()}
    assert all(0.15 < tests_s[name] < 4.0 for name in ("test_its_own", "test_a_child", "test_a_fixture")), tests_s
    assert tests_s["test_nothing"] < 0.2
    assert not run["is_whole"] and run["status"] == 0
    assert sum(added_up(run["tests_s"], folder_of).values()) == pytest.approx(sum(run["tests_s"].values()))
