"""Each engine's GPU, from literals; MPS with a stand-in for NVIDIA's daemon."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.flags import config_from
from deploy.launcher.mps import CONTROL, PIPE, mps_for
from deploy.launcher.plan import Gpus, ProcessSpec, chosen_gpus, num_ports, plan_cluster, shared_gpus, with_env
from deploy.launcher.roles import ClusterConfig, RoleFlags
from deploy.launcher.up_flags import build_parser, gpus_for
from engine.device.gpus import VISIBLE, visible_gpus
from service.flags import ConfigError
from tests.e2e.cluster import wait_until

UUIDS = ["GPU-5c8b0a", "GPU-77d1f2", "GPU-77e000"]
LISTING = """GPU 0: NVIDIA H200 (UUID: GPU-5c8b0a)
GPU 1: NVIDIA H200 (UUID: GPU-77d1f2)
  MIG 1g.18gb     Device  0: (UUID: MIG-aa)
  MIG 3g.71gb     Device  1: (UUID: MIG-bb)
"""
DAEMON = """#!{python}
import os, sys, time
folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
quit = os.path.join(folder, "quit")
if sys.argv[1:] == ["-f"]:
    {begin}
    with open(os.path.join(folder, "pid.new"), "w") as file:
        file.write(f"{{os.getpid()}} {{os.environ.get('CUDA_VISIBLE_DEVICES')}}")
    os.rename(file.name, os.path.join(folder, "pid"))
    while os.path.isdir(folder) and not os.path.exists(quit):
        time.sleep(0.01)
elif sys.stdin.read() == "quit\\n":
    open(quit, "w").close()
else:
    sys.exit(not os.path.exists(os.path.join(folder, "pid")))
"""


def cluster_of(
    prefill: int, decode: int, gpus: list[str], *args: str, ranks: int = 1, **flags: bool
) -> list[ProcessSpec]:
    """`ranks`: of each prefill worker; decode workers have one."""
    config = ClusterConfig(prefill=prefill, decode=decode, **flags)
    free = range(100, 100 + num_ports(config))
    roles = {"prefill": RoleFlags(args=args, ranks=ranks), "decode": RoleFlags(args=args)}
    *workers, _ = plan_cluster(config, front=9, free=free, cores=8, gpus=Gpus(gpus, 0.8), flags=roles)
    return workers


def test_each_engine_gets_a_gpu_of_its_own_while_there_are_enough() -> None:
    workers = cluster_of(1, 2, [*UUIDS, "GPU-spare"], "--mem-fraction-static=0.8")
    assert [worker.env[VISIBLE] for worker in workers] == UUIDS
    assert all(worker.argv[-1] == "--mem-fraction-static=0.8" for worker in workers)
    assert shared_gpus(workers) == {}


def test_more_engines_than_gpus_are_one_clear_error_unless_they_may_share() -> None:
    with pytest.raises(ConfigError, match=r"--share-gpus: 4 engines for 1 GPU \(0\); start fewer"):
        cluster_of(2, 2, ["0"])
    workers = cluster_of(1, 2, ["0", "1"], "--mem-fraction-static=0.8", "--page-size=4", share_gpus=True)
    assert [worker.env[VISIBLE] for worker in workers] == ["0", "1", "0"]
    shares = [[arg for arg in worker.argv if "fraction" in arg] for worker in workers]
    assert shares == [["--mem-fraction-static=0.4"], ["--mem-fraction-static=0.8"], ["--mem-fraction-static=0.4"]]
    assert all("--page-size=4" in worker.argv for worker in workers)
    assert shared_gpus(workers) == {"0": ["prefill-0", "decode-1"]}
    env = with_env(workers, ["decode-1"], {PIPE: "/run"})
    assert [worker.env.get(PIPE) for worker in env] == [None, None, "/run"]


def test_each_rank_gets_a_gpu_and_no_engine_has_one_twice() -> None:
    workers = cluster_of(1, 2, ["0", "1", "2", "3"], ranks=2)
    assert [worker.env[VISIBLE] for worker in workers] == ["0,1", "2", "3"]
    with pytest.raises(ConfigError, match=r"--share-gpus: 3 engines, which have 4 ranks, for 3 GPUs \(0, 1, 2\)"):
        cluster_of(1, 2, ["0", "1", "2"], ranks=2)
    workers = cluster_of(1, 2, ["0", "1", "2"], ranks=2, share_gpus=True)
    assert [worker.env[VISIBLE] for worker in workers] == ["0,1", "2", "0"]
    assert [worker.argv[-1] for worker in workers if worker.argv[-1].startswith("--mem")] == [
        "--mem-fraction-static=0.4"
    ] * 2
    assert shared_gpus(workers) == {"0": ["prefill-0", "decode-1"]}
    (alone, _) = cluster_of(1, 1, ["0"], ranks=2, share_gpus=True)
    assert alone.env[VISIBLE] == "0"  # the worker itself refuses, and names its flag


@pytest.mark.parametrize(
    ("outer", "visible"),
    [
        (None, ["0", "1"]),
        ("", []),
        ("-1", []),
        ("3", ["3"]),
        ("3, 5", ["3", "5"]),
        ("3,-1,5", ["3"]),
        ("GPU-a", ["GPU-a"]),
    ],
)
def test_an_outer_cuda_visible_devices_is_all_there_is(outer: str | None, visible: list[str]) -> None:
    assert visible_gpus(outer, lambda: ["0", "1"]) == visible


def test_gpu_ids_count_among_the_visible_or_name_uuids() -> None:
    assert chosen_gpus(["3", "5"], ("1",)) == ["5"]
    assert chosen_gpus(UUIDS, ("2", "GPU-77d")) == ["GPU-77e000", "GPU-77d1f2"]
    assert chosen_gpus(UUIDS, ()) == UUIDS
    for wanted in (("2",), ("GPU-77",), ("GPU-x",)):
        with pytest.raises(ConfigError, match=r"--gpu-ids .*: names no GPU that is visible here: 0 \(GPU-5c8b0a\), 1 "):
            chosen_gpus(UUIDS[:2] if wanted == ("2",) else UUIDS, wanted)
    with pytest.raises(ConfigError, match="--gpu-ids 0 GPU-5c: names a GPU twice"):
        chosen_gpus(UUIDS, ("0", "GPU-5c"))


def gpus_of(*argv: str, torch: str | None = "2.13.0+cpu") -> list[str]:
    args = build_parser().parse_strict(argv)
    return gpus_for(config_from(args, ClusterConfig), args, torch=torch)


def test_nvidia_smi_counts_where_engines_run_on_gpus_and_is_not_asked_where_they_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    smi.write_text(f"#!/bin/sh\ntouch {asked}\ncat <<'END'\n{LISTING}END\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(VISIBLE, raising=False)
    assert gpus_of() == gpus_of(torch=None) == gpus_of("--device=cpu", torch="2.13.0+cu130") == []
    assert not asked.exists()
    assert gpus_of(torch="2.13.0") == gpus_of("--device=cuda") == ["GPU-5c8b0a", "MIG-aa", "MIG-bb"]
    assert gpus_of("--device=cuda", "--gpu-ids", "2", "0") == ["MIG-bb", "GPU-5c8b0a"]
    monkeypatch.setenv(VISIBLE, "4,6")
    assert gpus_of("--device=cuda", "--gpu-ids", "1") == ["6"]
    with pytest.raises(ConfigError, match="--gpu-ids: the engines run on CPUs"):
        gpus_of("--gpu-ids", "0")


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: str = "pass") -> None:
    """Put a control daemon on PATH. `begin`: what it does first."""
    program = tmp_path / CONTROL
    program.write_text(DAEMON.format(python=sys.executable, begin=begin))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(PIPE, raising=False)


def test_mps_runs_in_the_run_s_folder_and_ends_with_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch)
    monkeypatch.setenv(VISIBLE, "7,8")
    for gpu, shown in (("GPU-5c8b0a", "GPU-5c8b0a"), ("7", "None")):
        run_dir = tmp_path / gpu
        run_dir.mkdir()
        with mps_for({gpu: ["prefill-0", "decode-0"]}, run_dir=run_dir) as (env, lines):
            assert env == {PIPE: str(run_dir / "mps")} and (run_dir / "mps").stat().st_mode & 0o777 == 0o700
            pid, seen = (run_dir / "mps" / "pid").read_text().split()
            assert seen == shown and Path(f"/proc/{pid}").exists()
            assert lines == [f"prefill-0 and decode-0 share GPU {gpu}", "they run side by side, by MPS"]
        assert not Path(f"/proc/{pid}").exists()


def test_mps_ends_with_a_launcher_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    code = (
        "import sys, pathlib; from deploy.launcher.mps import mps_for\n"
        f"with mps_for({{'GPU-a': ['p', 'd']}}, run_dir=pathlib.Path({str(tmp_path)!r})):\n"
        "    print('up', flush=True); sys.stdin.read()"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None and launcher.stdin is not None
    assert launcher.stdout.readline() == "up\n"
    pid = (tmp_path / "mps" / "pid").read_text().split()[0]
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), within_s=10, what="the daemon has ended")


def test_without_mps_a_line_says_that_engines_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shared = {"0": ["prefill-0", "decode-0"]}
    with mps_for(shared, run_dir=tmp_path) as (env, lines):
        assert env == {} and "turns of some milliseconds: nvidia-cuda-mps-control (MPS) is not on PATH" in lines[-1]
    stand_in(tmp_path, monkeypatch, begin="sys.exit('An instance of this daemon is already running')")
    with mps_for(shared, run_dir=tmp_path) as (env, lines):
        assert env == {} and lines[-1].endswith("did not start: An instance of this daemon is already running")
    deep = tmp_path / ("d" * 80)
    with mps_for(shared, run_dir=deep) as (env, lines):  # a socket there would have too long a path
        assert env == {} and lines[-1].endswith(
            f"{deep}/mps is too long for the sockets of MPS; give a shorter --run-dir"
        )
    monkeypatch.setenv(PIPE, "/run/mps")
    with mps_for(shared, run_dir=tmp_path) as (env, lines):
        assert env == {} and lines[-1] == "they use the MPS daemon of CUDA_MPS_PIPE_DIRECTORY=/run/mps"


def test_nothing_is_started_where_no_gpu_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    with mps_for({}, run_dir=tmp_path) as (env, lines):
        assert (env, lines, (tmp_path / "mps").exists()) == ({}, [], False)
