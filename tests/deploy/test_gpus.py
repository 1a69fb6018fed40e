"""Each engine's GPU, from literals."""

import os
from pathlib import Path
from typing import Any

import pytest

from deploy.flags import config_from
from deploy.launcher.mps import PIPE
from deploy.launcher.plan import (
    Gpus,
    ProcessSpec,
    SharedGpus,
    chosen_gpus,
    num_ports,
    plan_cluster,
    shared_gpus,
    shared_groups,
    with_env,
)
from deploy.launcher.roles import ClusterConfig, RoleFlags
from deploy.launcher.up_flags import build_parser, gpus_for
from engine.device.gpus import VISIBLE, visible_gpus
from service.flags import ConfigError

UUIDS = ["GPU-5c8b0a", "GPU-77d1f2", "GPU-77e000"]
LISTING = """GPU 0: NVIDIA H200 (UUID: GPU-5c8b0a)
GPU 1: NVIDIA H200 (UUID: GPU-77d1f2)
  MIG 1g.18gb     Device  0: (UUID: MIG-aa)
  MIG 3g.71gb     Device  1: (UUID: MIG-bb)
"""


def cluster_of(
    prefill: int, decode: int, gpus: list[str], *args: str, ranks: int = 1, **flags: Any
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


def test_engines_that_share_a_gpu_directly_or_over_another_engine_are_one_group() -> None:
    workers = cluster_of(1, 2, ["0", "1", "2"], ranks=2, share_gpus=True)
    [pair] = shared_groups(workers)  # prefill on 0 and 1, decodes on 2 and 0
    assert pair == SharedGpus(gpus=("0",), engines=("prefill-0", "decode-1"), limited=frozenset({"prefill-0"}))
    chain = cluster_of(2, 1, ["0", "1", "2"], ranks=2, share_gpus=True)  # prefills on 0, 1 and 2, 0; decode on 1
    [group] = shared_groups(chain)
    assert set(group.gpus) == {"0", "1"} and set(group.engines) == {"prefill-0", "prefill-1", "decode-0"}
    assert group.limited == {"prefill-0"}, "the other shares with it alone"
    apart = shared_groups(cluster_of(2, 2, ["0", "1"], share_gpus=True))
    assert [group.engines for group in apart] == [("prefill-0", "decode-0"), ("prefill-1", "decode-1")]


def test_a_percentage_without_shared_gpus_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="--mps-prefill-percentage 50: is of a GPU that workers share; give --share-gpus"
    ):
        cluster_of(1, 1, ["0", "1"], mps_prefill_percentage=50)
    for wrong in ("0", "101"):
        with pytest.raises(ConfigError, match="--mps-prefill-percentage: must be"):
            config_from(build_parser().parse_strict([f"--mps-prefill-percentage={wrong}"]), ClusterConfig)


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
