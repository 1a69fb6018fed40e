"""The launcher over scripted children, as real processes: start, death, Ctrl-C, kill -9."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.launcher.probe import free_ports
from deploy.launcher.supervisor import RestartPolicy, Restarts
from tests.deploy.test_mps import stand_in
from tests.e2e.cluster import wait_until

LAUNCH = Path(__file__).with_name("launch_scripted.py")
Start = Callable[..., "Launch"]


class Launch:
    """A running launcher and where it writes."""

    def __init__(
        self,
        tmp_path: Path,
        specs: list[tuple[str, int, list[str]]],
        timeout_s: float = 60,
        drain_s: float = 0.0,
        restart: str = "always",
        sharing: Sequence[str] = (),
    ) -> None:
        self.ports = [port for _, port, _ in specs]
        self.ready_file = tmp_path / "ready.json"
        last = [str(timeout_s), str(drain_s), restart, *([json.dumps(sharing)] if sharing else [])]
        argv = [sys.executable, str(LAUNCH), str(tmp_path), str(self.ready_file), json.dumps(specs), *last]
        self._err = tmp_path / "stderr"
        with self._err.open("wb") as err:
            self.process = subprocess.Popen(argv, stderr=err)

    def pids(self) -> dict[str, int]:
        wait_until(lambda: self.ready_file.exists() or self.process.poll() is not None, within_s=20, what="ready")
        assert self.process.poll() is None, self.said()
        return dict(json.loads(self.ready_file.read_text()))

    def pid_at(self, port: int) -> int | None:
        """The process that answers at a port; None: none does."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as reply:
                return int(json.loads(reply.read())["pid"])
        except OSError:
            return None

    def said(self) -> str:
        """All of stderr; the launcher must be about to end."""
        self.process.wait(30)
        return self.stderr()

    def stderr(self) -> str:
        """What stderr has so far."""
        return self._err.read_text()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    launches: list[Launch] = []

    def begin(*extras: list[str], **options: Any) -> Launch:
        ports = free_ports(len(extras))
        names = options.pop("names", [f"worker-{i}" for i in range(len(extras))])
        specs = list(zip(names, ports, extras, strict=True))
        launches.append(Launch(tmp_path, specs, **options))
        return launches[-1]

    yield begin
    for launch in launches:
        launch.end()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_child_that_ignores_the_drain_has_its_time_then_it_and_its_grandchild_are_killed(
    start: Start, tmp_path: Path
) -> None:
    pid_file = tmp_path / "grandchild"
    launch = start(["--ignore-drain", "--grandchild", str(pid_file)])
    pids = [*launch.pids().values(), int(pid_file.read_text())]
    before = time.monotonic()
    launch.process.terminate()
    launch.said()
    assert time.monotonic() - before > 3.0
    assert launch.process.returncode == 0
    wait_until(lambda: not any(map(alive, pids)), within_s=20, what="all have ended")


def test_sigterm_drains_the_router_before_the_workers_and_a_second_signal_ends_all(
    start: Start, tmp_path: Path
) -> None:
    """The router here never ends by itself."""
    note = tmp_path / "note"
    launch = start([], ["--note-drain", str(note)], names=["worker", "router"], drain_s=600.0)
    pids = launch.pids()
    launch.process.terminate()
    wait_until(note.exists, within_s=20, what="the router is to drain")
    assert alive(pids["worker"])
    launch.process.send_signal(signal.SIGINT)
    launch.said()
    assert launch.process.returncode == 0 and not any(map(alive, pids.values()))


def test_death_at_start_shows_the_last_error_and_ends_the_rest(start: Start, tmp_path: Path) -> None:
    launch = start(["--never-healthy"], ["--die-at-start", "ConfigError: --page-size: must be at least 1"])
    said = launch.said()
    assert launch.process.returncode == 1
    assert "worker-1 ended (exit status 3): ConfigError: --page-size: must be at least 1" in said
    assert "Traceback" not in said
    assert not launch.ready_file.exists()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{launch.ports[0]}/health", timeout=1).close()


def test_what_dies_starts_again_at_its_port_and_keeps_its_log(start: Start, tmp_path: Path) -> None:
    """The second death, too."""
    launch = start([], [], names=["decode-0", "router"])
    seen = [launch.pids()["decode-0"]]

    def another_answers() -> bool:
        pid = launch.pid_at(launch.ports[0])
        if pid is None or pid in seen:
            return False
        seen.append(pid)
        return True

    for _ in range(2):
        os.kill(seen[-1], signal.SIGKILL)
        wait_until(another_answers, within_s=20, what="it answers again")
        assert launch.pids()["decode-0"] == seen[-1], "the ready file has the new process"
        wait_until(lambda: f"pid {seen[-1]}" in launch.stderr(), within_s=20, what="the launcher says so")
    launch.process.send_signal(signal.SIGINT)
    said = launch.said()
    assert launch.process.returncode == 0 and not any(map(alive, seen))
    assert "decode-0 ended (signal SIGKILL): its log is empty" in said and "it starts again in 0.01 s" in said
    assert "it starts again in 0.02 s" in said and said.count("decode-0 is healthy again after") == 2


def test_a_router_that_stays_dead_ends_all_with_status_1(start: Start, tmp_path: Path) -> None:
    launch = start([], ["--starts-once", str(tmp_path / "once")], names=["decode-0", "router"])
    pids = launch.pids()
    os.kill(pids["router"], signal.SIGKILL)
    said = launch.said()
    assert launch.process.returncode == 1 and not any(map(alive, pids.values()))
    assert said.count("it starts again in") == 2
    assert (
        "error: router ended (exit status 1): OSError: it starts once only" in said and "it stays dead, so all" in said
    )


def test_restart_never_leaves_a_dead_worker_dead_and_ends_with_the_router(start: Start) -> None:
    launch = start([], [], names=["decode-0", "router"], restart="never")
    pids = launch.pids()
    os.kill(pids["decode-0"], signal.SIGKILL)
    wait_until(lambda: "the others go on" in launch.stderr(), within_s=20, what="the launcher says so")
    assert alive(pids["router"]) and launch.pid_at(launch.ports[0]) is None
    os.kill(pids["router"], signal.SIGKILL)
    said = launch.said()
    assert launch.process.returncode == 1 and "starts again" not in said


# ---- Engines that share a GPU by MPS.


def test_one_death_ends_those_that_share_its_gpu_once_and_a_new_daemon_serves_them(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch)
    names = ["prefill-0", "decode-0", "decode-1", "router"]
    launch = start([], [], [], [], names=names, sharing=names[:2])
    before = launch.pids()
    daemons = tmp_path / "mps-0" / "starts"
    os.kill(before["decode-0"], signal.SIGKILL)
    for name in ("decode-0", "prefill-0"):
        wait_until(lambda name=name: f"{name} is healthy again" in launch.stderr(), within_s=30, what=f"{name} is back")  # type: ignore[misc]
    after = launch.pids()
    assert {name for name in names if after[name] != before[name]} == {"prefill-0", "decode-0"}
    assert all(
        alive(after[name]) and launch.pid_at(port) == after[name]
        for name, port in zip(names, launch.ports, strict=True)
    )
    first, second = daemons.read_text().split()
    assert not alive(int(first)) and alive(int(second))
    os.kill(after["prefill-0"], signal.SIGKILL)  # the other way, and again
    wait_until(lambda: launch.stderr().count("decode-0 is healthy again") == 2, within_s=30, what="decode-0 is back")
    launch.process.send_signal(signal.SIGINT)
    said = launch.said()
    assert len(daemons.read_text().split()) == 3 and not any(alive(int(pid)) for pid in daemons.read_text().split())
    for victim, dead in (("prefill-0", "decode-0"), ("decode-0", "prefill-0")):
        assert said.count(f"tandem up: {victim} ends, too: it shares GPU GPU-a with {dead}\n") == 1
    assert said.count("tandem up: MPS starts anew\n") == 2


def test_deaths_of_both_at_once_are_one(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    names = ["prefill-0", "decode-0", "router"]
    launch = start([], [], [], names=names, sharing=names[:2])
    before = launch.pids()
    for name in names[:2]:
        os.kill(before[name], signal.SIGKILL)
    for name in names[:2]:
        wait_until(lambda name=name: f"{name} is healthy again" in launch.stderr(), within_s=30, what=f"{name} is back")  # type: ignore[misc]
    after = launch.pids()
    launch.process.send_signal(signal.SIGINT)
    said = launch.said()
    assert said.count("is healthy again") == 2 and said.count("tandem up: MPS starts anew") == 1
    assert all(f"pid {after[name]}" in said for name in names[:2])


def test_a_process_that_drained_ends_no_other(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    launch = start([], ["--drains"], [], names=["prefill-0", "decode-0", "router"], sharing=["prefill-0", "decode-0"])
    pids = launch.pids()
    os.kill(pids["decode-0"], signal.SIGUSR1)
    wait_until(lambda: "the others go on" in launch.stderr(), within_s=20, what="the launcher says so")
    assert launch.pid_at(launch.ports[0]) == pids["prefill-0"] and "ends, too" not in launch.stderr()


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_stable_time() -> None:
    restarts = Restarts(RestartPolicy(first_s=1.0, longest_s=5.0, stable_s=60.0), is_front=False)
    assert [restarts.pause_s(-9, 0.0) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert {restarts.pause_s(-9, 0.0) for _ in range(2000)} == {5.0}
    restarts.became_healthy(100.0)
    assert restarts.pause_s(1, 159.0) == 5.0
    restarts.became_healthy(200.0)
    assert restarts.pause_s(1, 260.0) == 1.0
    assert restarts.pause_s(1, 400.0) == 2.0, "it was not healthy in between"


def test_the_front_stays_dead_after_its_tries_and_a_drained_process_is_not_dead() -> None:
    policy = RestartPolicy(front_tries=2)
    front, worker = Restarts(policy, is_front=True), Restarts(policy, is_front=False)
    assert [front.pause_s(1, 0.0) for _ in range(3)] == [1.0, 2.0, None]
    assert worker.pause_s(0, 0.0) is None
    assert Restarts(RestartPolicy(always=False), is_front=False).pause_s(1, 0.0) is None


def test_never_healthy_is_an_error_after_the_timeout(start: Start) -> None:
    launch = start(["--never-healthy"], timeout_s=1.0)
    said = launch.said()
    assert launch.process.returncode == 1
    assert "worker-0 not healthy after 1 s (--start-timeout)" in said


def test_ctrl_c_while_loading_ends_with_status_0(start: Start) -> None:
    launch = start(["--never-healthy"])
    wait_until(lambda: "starting" in launch.stderr(), within_s=20, what="it starts")
    launch.process.send_signal(signal.SIGINT)
    launch.said()
    assert launch.process.returncode == 0


def test_a_port_is_chosen_once_before_its_server_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """By two processes, too: the second one asks for the same ports in the same order."""
    monkeypatch.setattr(random, "SystemRandom", lambda: random.Random(7))
    ports = free_ports(3)
    code = "import random; random.SystemRandom = lambda: random.Random(7)\n"
    code += "from deploy.launcher.probe import free_ports; print(*free_ports(3))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len({*ports, *map(int, other.stdout.split())}) == 6
    assert len({*ports, *free_ports(3)}) == 6
