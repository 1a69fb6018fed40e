"""A run on a machine that lacks something stops before the first test, with one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG, SHARED, STARTED
from tests.machine import needs
from tests.machine.needs import TESTS, TREE, complaint


@pytest.mark.parametrize("args", [["tests/transfer"], ["-n", "2"]], ids=["one process", "xdist"])
def test_a_missing_library_is_said_once(args: list[str], tmp_path: Path):
    stub = tmp_path / "ldconfig"  # a machine without any library
    stub.write_text("#!/bin/sh\n")
    stub.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
    done = subprocess.run(command, cwd=TREE, env=env, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line]
    assert done.returncode != 0
    assert len(lines) == 1, lines
    assert "libibverbs1" in lines[0] and lines[0].endswith("run: bash deploy/system_packages.sh tests")


@pytest.mark.parametrize(
    ("missing", "selected", "named"),
    [
        ("chromium", "tests", True),
        ("chromium", "tests/router", True),
        ("chromium", "tests/router/http/test_dashboard.py", True),
        ("chromium", "tests/core", False),
        ("prometheus", "tests/deploy/test_alert_rules.py", True),
        ("prometheus", "tests/deploy/test_cli.py", False),
        ("libnuma1", "tests/e2e/tiny/test_identity.py", True),
        ("libnuma1", "tests/core", False),
        ("gcc", "tests/core", True),
        ("python3-venv", "tests", False),
    ],
)
def test_a_run_stops_only_for_what_its_tests_need(
    missing: str, selected: str, named: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(needs, "missing_packages", lambda: [missing])
    assert (missing in complaint([TREE / selected])) == named


def test_a_missing_module_is_said_with_what_brings_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(needs, "missing_packages", lambda: [])
    monkeypatch.setattr(needs, "MODULES", ("os", "no_such_module"))
    assert complaint().endswith("Python packages that are missing here (no_such_module); run: make setup")
    assert complaint([TESTS / "core"]) == ""


@pytest.mark.parametrize(
    ("word", "users"),
    [("tests.router.http.browser import", needs.BROWSER), ("import_mooncake", needs.MOONCAKE)],
)
def test_the_users_of_a_package_are_all_listed(word: str, users: tuple[str, ...]):
    files = [path for path in TESTS.rglob("*.py") if word in path.read_text()]
    assert files
    assert [path for path in files if not any(path.is_relative_to(TESTS / user) for user in users)] == []


def test_the_places_that_are_named_exist():
    named = {*LONG, *SHARED, *STARTED, *(user for users in needs.USERS.values() for user in users)}
    assert sorted(place for place in named if not (TESTS / place).exists()) == []
