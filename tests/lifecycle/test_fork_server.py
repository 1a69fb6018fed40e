"""A fork server's children: what they take over, how they end, and with whom."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.launcher.fork_servers import fork_server
from service.process.child_process import SERVER_VARIABLE, ForkedProcess, forked, server_in
from service.process.stop_signals import END, TO_GROUPS
from tests.e2e.cluster import wait_until

PART = "tests.lifecycle.forked_part"
WITHIN_S = 30.0
ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}


@pytest.fixture(scope="module")
def env() -> Iterator[dict[str, str]]:
    with fork_server([PART], env=ENV) as server:
        yield {**ENV, **server}


def start(
    env: dict[str, str], *args: str, descriptors: tuple[int, ...] = (), ignored: tuple[int, ...] = ()
) -> ForkedProcess:
    server = server_in(env)
    assert server is not None
    child = forked(server, PART, args, env=env, descriptors=descriptors, ignored=ignored)
    assert child is not None
    return child


def told(env: dict[str, str]) -> dict[str, Any]:
    """What a child finds of itself."""
    reading, writing = os.pipe()
    try:
        child = start(env, "tell", str(writing), descriptors=(writing,))
    finally:
        os.close(writing)
    with open(reading, "rb") as answer:
        facts = dict(json.loads(answer.read()))
    assert (child.pid, child.wait()) == (facts["pid"], 0)
    return {**facts, "writing": writing}


def pid_in(file: Path) -> int:
    wait_until(lambda: file.exists() and bool(file.read_text()), within_s=WITHIN_S, what=f"{file}")
    return int(file.read_text())


def ends(pid: int) -> None:
    wait_until(lambda: not psutil.pid_exists(pid), within_s=WITHIN_S, what=f"the end of {pid}")


def test_a_child_is_as_a_new_process_but_for_what_the_server_imported(env: dict[str, str], tmp_path: Path) -> None:
    """Environment, folder, group, arguments, signals, descriptors by their numbers and no others."""
    first, second = told({**env, "TANDEM_OWN": "1"}), told(env)
    assert first["env"] == {**env, "TANDEM_OWN": "1"} and second["env"] == env
    assert (first["folder"], first["group"]) == (os.getcwd(), os.getpgrp())
    assert first["argv"] == [PART, "tell", str(first["writing"])] and first["sigint"]
    assert first["descriptors"] == [0, 1, 2, first["writing"]]
    assert first["imported_in"] == second["imported_in"] not in (os.getpid(), first["pid"])


def test_ps_shows_the_part_that_a_child_plays_and_for_whom(env: dict[str, str], tmp_path: Path) -> None:
    child = start(env, "wait", str(tmp_path / "pid"))
    words = psutil.Process(pid_in(tmp_path / "pid")).cmdline()
    assert words[1:6] == ["-m", PART, f"--started-by={os.getpid()}", "wait", str(tmp_path / "pid")]
    child.kill()
    assert child.wait() == -signal.SIGKILL


@pytest.mark.parametrize(("args", "status"), [(("exit", "3"), 3), (("raise",), 1), (("touch", "/dev/null"), 0)])
def test_the_status_is_that_of_the_child(env: dict[str, str], args: tuple[str, ...], status: int) -> None:
    child = start(env, *args)
    assert child.wait() == status == child.poll()


def test_a_signal_reaches_the_child_and_is_its_status(env: dict[str, str], tmp_path: Path) -> None:
    child = start(env, "wait", str(tmp_path / "pid"))
    pid_in(tmp_path / "pid")
    assert child.poll() is None
    child.terminate()
    assert child.wait() == -signal.SIGTERM
    child.kill()  # of one that has ended: nothing


def test_signals_to_all_end_neither_the_server_nor_a_child_that_ignores_them(tmp_path: Path) -> None:
    """A service manager sends them to every process of a service."""
    with fork_server([PART], env=ENV) as server:
        env = {**ENV, **server}
        child = start(env, "wait", str(tmp_path / "pid"), ignored=TO_GROUPS)
        pid = pid_in(tmp_path / "pid")
        for number in TO_GROUPS:
            os.kill(psutil.Process(pid).ppid(), number)
            child.send_signal(number)
        assert start(env, "exit", "6").wait() == 6
        child.send_signal(END)
        assert child.wait() == -END


def test_a_child_ends_with_the_process_that_asked_for_it(env: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.lifecycle.fork_client", "wait", str(tmp_path / "pid")]
    with subprocess.Popen(command, env=env) as client:
        pid = pid_in(tmp_path / "pid")
        client.kill()
    ends(pid)
    assert told(env)["argv"]  # the server serves on


def test_a_child_ends_with_its_server_and_later_ones_start_anew(tmp_path: Path) -> None:
    with fork_server([PART], env=ENV) as server:
        env = {**ENV, **server}
        child = start(env, "wait", str(tmp_path / "pid"))
        pid = pid_in(tmp_path / "pid")
    ends(pid)
    assert child.wait() == -signal.SIGKILL
    server = server_in(env)
    assert server is not None and forked(server, PART, ["exit", "0"], env=env) is None


def test_a_server_forks_nothing_in_an_environment_that_its_imports_have_not_read(env: dict[str, str]) -> None:
    assert server_in({**env, "TANDEM_OWN": "1", "OTEL_BSP_SCHEDULE_DELAY": "7"}) is not None
    assert server_in({**env, "LD_PRELOAD": "/nowhere.so"}) is None
    assert server_in({**env, "GOMP_SPINCOUNT": "7"}) is None
    assert server_in({k: v for k, v in env.items() if k != SERVER_VARIABLE}) is None


def test_a_request_waits_for_the_imports_and_one_given_up_meanwhile_starts_nothing(tmp_path: Path) -> None:
    gate, given_up, waited = (tmp_path / name for name in ("gate", "given up", "waited"))
    with fork_server([PART], env={**ENV, "TANDEM_TEST_GATE": str(gate)}) as server:
        env = {**ENV, **server}
        early, late = start(env, "touch", str(given_up)), start(env, "touch", str(waited))
        assert early.poll() is None
        early.terminate()
        assert early.wait() == -signal.SIGTERM
        gate.touch()
        assert late.wait() == 0
    assert waited.exists() and not given_up.exists()


def test_a_child_is_one_of_the_modules_that_the_server_was_started_with(env: dict[str, str], tmp_path: Path) -> None:
    server = server_in(env)
    assert server is not None
    other = forked(server, "json.tool", ["--help"], env=env)
    assert other is not None and other.wait() == -signal.SIGKILL and other.pid == 0
    assert start(env, "exit", "5").wait() == 5


def test_a_module_that_is_missing_is_named_and_keeps_nothing_else_from_being_forked(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log, fork_server(["no_such_module", PART], env=ENV, log=log) as server:
        assert start({**ENV, **server}, "exit", "4").wait() == 4
    assert "no_such_module" in (tmp_path / "log").read_text()
