"""MPS for engines that share a GPU. A stand-in for NVIDIA's control daemon is on PATH under its name: a real process, told over
the stdin of others of its kind. Each start as a daemon adds a line to `starts` in its folder."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from deploy.launcher.mps import CONTROL, PIPE, THREADS, MpsDaemon, Sharing, mps_for
from deploy.launcher.plan import SharedGpus
from engine.device.gpus import VISIBLE
from tests.e2e.cluster import wait_until

DAEMON = """#!{python} -IS
import os, subprocess, sys, time
folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
quit, pid_file = os.path.join(folder, "quit"), os.path.join(folder, "pid")
if sys.argv[1:] == ["-f"]:
    for name in (quit, pid_file):
        if os.path.exists(name):
            os.remove(name)
    with open(os.path.join(folder, "starts"), "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    {begin}
    with open(pid_file + ".new", "w") as file:
        file.write(f"{{os.getpid()}} {{os.environ.get('CUDA_VISIBLE_DEVICES')}}")
    os.rename(file.name, pid_file)
    while os.path.isdir(folder) and not os.path.exists(quit):
        time.sleep(0.01)
    if os.path.exists(pid_file):
        os.remove(pid_file)
elif sys.stdin.read() == "quit\\n":
    open(quit, "w").close()
else:
    sys.exit(not os.path.exists(pid_file))
"""
SECOND_START_FAILS = """
    if len(open(file.name).readlines()) > 1:
        sys.exit("no GPU")
"""
LEAVES_A_SERVER = """
    server = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
    open(os.path.join(folder, "server"), "w").write(str(server.pid))
"""


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: str = "pass") -> None:
    """Put a control daemon on PATH. `begin`: what it does first."""
    program = tmp_path / CONTROL
    program.write_text(DAEMON.format(python=sys.executable, begin=begin.strip()))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in (PIPE, THREADS):
        monkeypatch.delenv(name, raising=False)


PAIR = ("prefill-0", "decode-0")


def group(gpu: str = "GPU-5c8b0a", engines: tuple[str, ...] = PAIR) -> SharedGpus:
    return SharedGpus(gpus=(gpu,), engines=engines, limited=frozenset(engines[:1]))


def test_mps_runs_in_the_run_s_folder_and_ends_with_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch)
    monkeypatch.setenv(VISIBLE, "7,8")
    for gpu, shown in (("GPU-5c8b0a", "GPU-5c8b0a"), ("7", "None")):
        run_dir = tmp_path / gpu[-1]  # short: sockets have their place in it
        run_dir.mkdir()
        with mps_for([group(gpu)], percentage=None, run_dir=run_dir) as mps:
            folder = run_dir / "mps-0"
            assert mps.env == {"prefill-0": {PIPE: str(folder), THREADS: "75"}, "decode-0": {PIPE: str(folder)}}
            assert folder.stat().st_mode & 0o777 == 0o700
            pid, seen = (folder / "pid").read_text().split()
            assert seen == shown and Path(f"/proc/{pid}").exists()
            assert mps.notes == [
                f"prefill-0 and decode-0 share GPU {gpu}",
                "they run side by side, by MPS; prefill-0: at most 75 % of the multiprocessors",
            ]
        assert not Path(f"/proc/{pid}").exists()


def test_each_group_has_a_daemon_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    groups = [group("GPU-a"), group("GPU-b", ("prefill-1", "decode-1"))]
    with mps_for(groups, percentage=100, run_dir=tmp_path) as mps:
        seen = [(tmp_path / f"mps-{i}" / "pid").read_text().split() for i in range(2)]
        assert [gpu for _, gpu in seen] == ["GPU-a", "GPU-b"] and len({pid for pid, _ in seen}) == 2
        assert mps.env["decode-1"] == {PIPE: str(tmp_path / "mps-1")} and mps.env["prefill-1"][THREADS] == "100"
        assert [domain.names for domain in mps.domains] == [frozenset(one.engines) for one in groups]


def test_a_percentage_of_the_environment_stays_unless_the_flag_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch)
    monkeypatch.setenv(THREADS, "30")
    for given, own in ((None, {}), (60, {THREADS: "60"})):
        with mps_for([group()], percentage=given, run_dir=tmp_path) as mps:
            assert mps.env["prefill-0"] == mps.env["decode-0"] | own


def test_mps_ends_with_a_launcher_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    code = (
        "import sys, pathlib; from deploy.launcher.mps import mps_for; from tests.deploy.test_mps import group\n"
        f"with mps_for([group()], percentage=None, run_dir=pathlib.Path({str(tmp_path)!r})):\n"
        "    print('up', flush=True); sys.stdin.read()"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None and launcher.stdin is not None
    assert launcher.stdout.readline() == "up\n"
    pid = (tmp_path / "mps-0" / "pid").read_text().split()[0]
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), within_s=10, what="the daemon has ended")


def test_without_mps_a_line_says_that_engines_take_turns_and_each_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turns(run_dir: Path = tmp_path) -> str:
        with mps_for([group()], percentage=50, run_dir=run_dir) as mps:
            assert mps.env == {} and mps.domains == []
            return mps.notes[-1].removeprefix("the driver gives them turns of some milliseconds: ")

    monkeypatch.setenv("PATH", str(tmp_path))
    assert turns() == "nvidia-cuda-mps-control (MPS) is not on PATH"
    stand_in(tmp_path, monkeypatch, begin="sys.exit('An instance of this daemon is already running')")
    assert turns().endswith("did not start: An instance of this daemon is already running")
    deep = tmp_path / ("d" * 80)  # a socket there would have too long a path
    assert turns(deep) == f"{deep}/mps-0 is too long for the sockets of MPS; give a shorter --run-dir"


def test_clients_of_another_s_daemon_end_together_but_the_daemon_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PIPE, "/run/mps")
    with mps_for([group()], percentage=50, run_dir=tmp_path) as mps:
        assert mps.env == {"prefill-0": {THREADS: "50"}, "decode-0": {}}
        assert mps.notes[-1].startswith(
            "they use the MPS daemon of CUDA_MPS_PIPE_DIRECTORY=/run/mps; prefill-0: at most 50 %"
        )
        assert [domain.names for domain in mps.domains] == [frozenset(PAIR)]


def test_nothing_is_started_where_no_gpu_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    with mps_for([], percentage=None, run_dir=tmp_path) as mps:
        assert mps == Sharing() and not (tmp_path / "mps-0").exists()


# ---- a daemon that is started again


def daemon_in(tmp_path: Path) -> MpsDaemon:
    folder = tmp_path / "mps"
    return MpsDaemon(str(tmp_path / CONTROL), folder=folder, gpus=["GPU-a"], env=os.environ)


def starts(tmp_path: Path) -> list[str]:
    """Daemons by pid."""
    return (tmp_path / "mps" / "starts").read_text().split()


def gone(pid: str) -> bool:
    try:
        return psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_another_daemon_takes_the_place_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    daemon = daemon_in(tmp_path)
    daemon.wait_ready()
    assert daemon.renew() == "MPS starts anew"
    first, second = starts(tmp_path)
    assert gone(first) and not gone(second) and (tmp_path / "mps" / "pid").read_text().split()[0] == second
    daemon.end()
    assert gone(second)


def test_a_daemon_that_does_not_start_again_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, begin=SECOND_START_FAILS)
    daemon = daemon_in(tmp_path)
    daemon.wait_ready()
    said = daemon.renew()
    assert said == (
        "the driver gives them turns of some milliseconds: nvidia-cuda-mps-control (MPS) did not start again: no GPU"
    )
    assert all(map(gone, starts(tmp_path)))


def test_a_server_that_outlives_its_daemon_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, begin=LEAVES_A_SERVER)
    daemon = daemon_in(tmp_path)
    daemon.wait_ready()
    server = (tmp_path / "mps" / "server").read_text()
    daemon.end()
    wait_until(lambda: gone(server), within_s=10, what="the server has ended")
