"""Which transport Mooncake is given: tables, and an engine over NVLink with stand-ins for its library, its allocator and the driver."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.kv_layout import layout_conflict
from tests.transfer.cores import JoinedCores
from tests.transfer.engines.cuda_driver import build_driver, build_library
from tests.transfer.rig import ROOT
from transfer_backends.contract import BackendUnavailable, Caps, FakeEngine, KVArgs, OpState, Pieces, Region
from transfer_backends.engines.environment import named_devices, ucx_settings
from transfer_backends.engines.mooncake_protocols import FORCED_BY, Machine, choose, of_gpu, settings
from transfer_backends.prefill.manager import Connected, EngineDriver
from transfer_backends.prefill.trials import Trials
from transfer_backends.sides import KVPoll
from transfer_backends.wire import layout_of

GPU = Machine(has_hca=True, on_gpu=True, built_in=lambda name: True, has_fabric=lambda: True)
CPU = replace(GPU, has_hca=False, on_gpu=False)
X86 = replace(GPU, built_in=lambda name: name == "SUPPORT_INTRA_NVLINK", has_fabric=lambda: False)


@pytest.mark.parametrize(
    ("asked", "given", "machine", "taken", "added"),
    [
        ("auto", [], CPU, "tcp", {"MC_FORCE_TCP": "1"}),
        ("auto", [], GPU, "rdma", {}),
        ("auto", ["MC_LOG_LEVEL"], CPU, "tcp", {"MC_FORCE_TCP": "1"}),
        ("auto", ["MC_FORCE_TCP", "MC_INTRANODE_NVLINK"], GPU, "tcp", {"MC_FORCE_TCP": "1"}),
        ("auto", ["MC_FORCE_MNNVL", "MC_INTRANODE_NVLINK"], GPU, "nvlink_intra", {"MC_INTRANODE_NVLINK": "1"}),
        ("auto", ["MC_INTRA_NVLINK"], GPU, "nvlink_intra", {"MC_INTRANODE_NVLINK": "1"}),
        ("auto", ["MC_FORCE_MNNVL", "MC_FORCE_HCA"], GPU, "nvlink", {"MC_FORCE_MNNVL": "1"}),
        ("tcp", [], GPU, "tcp", {"MC_FORCE_TCP": "1"}),
        ("tcp", ["MC_FORCE_TCP"], GPU, "tcp", {"MC_FORCE_TCP": "1"}),
        ("rdma", [], GPU, "rdma", {"MC_FORCE_HCA": "1"}),
        ("nvlink_intra", [], X86, "nvlink_intra", {"MC_INTRANODE_NVLINK": "1"}),
        ("nvlink", [], GPU, "nvlink", {"MC_FORCE_MNNVL": "1"}),
    ],
)
def test_the_protocol_taken_and_passed_to_mooncake(
    asked: str, given: list[str], machine: Machine, taken: str, added: dict[str, str]
) -> None:
    assert choose(asked, dict.fromkeys(given, "0"), machine) == taken  # Mooncake reads any value as yes
    assert settings(taken, asked=asked) == added


@pytest.mark.parametrize(
    ("asked", "given", "machine", "text"),
    [
        (
            "nvlink_intra",
            [],
            CPU,
            "protocol is nvlink_intra, but the KV cache is in host memory.* start with --device cuda",
        ),
        ("auto", ["MC_INTRANODE_NVLINK"], CPU, "MC_INTRANODE_NVLINK is set, but the KV cache is in host memory"),
        ("rdma", [], CPU, "no RDMA device .* or take tcp"),
        (
            "nvlink",
            [],
            X86,
            "nvlink is not built into .* wheels for aarch64 .* take nvlink_intra, which is, .*backend nixl",
        ),
        ("auto", ["MC_FORCE_MNNVL"], X86, "MC_FORCE_MNNVL is set, but nvlink is not built into"),
        ("nvlink", [], replace(GPU, has_fabric=lambda: False), "start nvidia-imex on every machine .*backend nixl"),
        (
            "nvlink_intra",
            [],
            replace(GPU, built_in=lambda name: False),
            r"not built into this Mooncake \(its wheels for x86_64 with CUDA have it\); or for NVLink",
        ),
    ],
)
def test_what_is_not_to_be_had_is_refused_with_its_remedy(
    asked: str, given: list[str], machine: Machine, text: str
) -> None:
    with pytest.raises(BackendUnavailable, match=text) as caught:
        choose(asked, dict.fromkeys(given, "1"), machine)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FORCED_BY)
@pytest.mark.parametrize("asked", ["tcp", "rdma", "nvlink_intra", "nvlink"])
def test_a_flag_against_the_environment_is_refused(asked: str, name: str) -> None:
    if FORCED_BY[name] == asked:
        assert choose(asked, {name: "1"}, GPU) == asked
        return
    with pytest.raises(BackendUnavailable, match=f"protocol {asked} contradicts {name} .* unset {name}"):
        choose(asked, {name: "1"}, GPU)


LIBRARY = """
import os
SUPPORT_INTRA_NVLINK, SUPPORT_MNNVL = True, True
seen = {"registered": [], "written": []}

class TransferEngine:
    def __init__(self):
        seen["env"] = sorted(name for name in os.environ if name in os.environ["WATCHED"].split())
    def initialize(self, *args): return 0
    def get_rpc_port(self): return 15000
    def register_memory(self, at, size, where):
        seen["registered"].append([at, size, where])
        return 0 if where.startswith("cuda:") or seen["env"] == ["MC_FORCE_TCP"] else -1
    def unregister_memory(self, at): return 0
    def transfer_submit_write(self, session, src, dst, size):
        seen["written"].append([session, src, dst, size])
        return 1
    def transfer_check_status(self, number): return 1
"""
ALLOCATOR = """
#include <stdlib.h>
#include <sys/types.h>
int mc_allocator_probe(int device) { return getenv("NO_FABRIC") ? 0 : 1; }
void *mc_allocator_malloc(ssize_t size, int device, void *stream) { return (void *)(0x7a0000000000 + device); }
void mc_allocator_free(void *at, ssize_t size, int device, void *stream) {}
"""
CODE = """
import json, sys
from transfer_backends.contract import BackendUnavailable, EngineError, KVArgs, Region
from transfer_backends.engines.registry import make_engine

args = KVArgs(Region(1 << 40, 8, 4096, 0), Region(1 << 20, 8, 64, None), "m", 16, "bf16")
try:
    engine = make_engine("mooncake", host="127.0.0.1", device=0, mooncake_protocol=sys.argv[1])
except BackendUnavailable as error:
    raise SystemExit(str(error))
engine.register(engine.caps.carried(args))
peer = engine.connect("d", engine.descriptor())
from mooncake.engine import seen
done = engine.poll(engine.probe(peer)).name
engine.connect("d", engine.descriptor())
try:
    engine.connect("its successor", engine.descriptor())
    said = ""
except EngineError as error:
    said = str(error)
caps = [engine.caps.name, engine.caps.carries_host_memory, engine.caps.inside_machine, engine.caps.resend_s]
print(json.dumps({**seen, "probe": done, "caps": caps, "successor": said}))
engine.close()
"""
KV_BYTES, TRIAL_BYTES, CUDA_MALLOC, FABRIC = 8 * 4096, 64 << 20, 0x7F0000000000, 0x7A0000000000


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `libcuda.so.1` and a package `mooncake`."""
    folder = tmp_path_factory.mktemp("stand-ins")
    build_driver(folder)
    (package := folder / "mooncake").mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text(LIBRARY)
    build_library(package, ALLOCATOR, "nvlink_allocator.so")
    return folder


def run(stand_ins: Path, protocol: str, **env: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in FORCED_BY}
    path = {"LD_LIBRARY_PATH": str(stand_ins), "PYTHONPATH": os.pathsep.join([str(stand_ins), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-c", CODE, protocol],
        cwd=ROOT,
        env={**own, **path, "WATCHED": " ".join(FORCED_BY), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


INTRA = ["mooncake_nvlink_intra", False, "nvlink", 0.0]


@pytest.mark.parametrize(
    ("protocol", "env", "variable", "caps", "trial"),
    [
        ("nvlink_intra", {}, "MC_INTRANODE_NVLINK", INTRA, CUDA_MALLOC),
        ("auto", {"MC_INTRANODE_NVLINK": "0"}, "MC_INTRANODE_NVLINK", INTRA, CUDA_MALLOC),
        ("nvlink", {}, "MC_FORCE_MNNVL", ["mooncake_nvlink", False, "nvlink", 0.0], FABRIC),
        ("tcp", {}, "MC_FORCE_TCP", ["mooncake", True, "unknown", 120.0], CUDA_MALLOC),
    ],
)
def test_an_engine_for_a_gpu_s_pages(
    stand_ins: Path, protocol: str, env: dict[str, str], variable: str, caps: list[Any], trial: int
) -> None:
    """Over NVLink no host memory is registered, and all else is of the kind that the transport needs."""
    ended = run(stand_ins, protocol, **env)
    assert ended.returncode == 0, ended.stderr
    seen: dict[str, Any] = json.loads(ended.stdout)
    rows = [[1 << 20, 8 * 64, "*"]] if protocol == "tcp" else []
    assert seen["env"] == [variable], "set before the engine was made, and no other"
    assert seen["registered"] == [[1 << 40, KV_BYTES, "cuda:0"], *rows, [trial, TRIAL_BYTES, "cuda:0"]]
    assert seen["written"] == [["127.0.0.1:15000", trial, trial, 8]] and seen["probe"] == "DONE"
    assert seen["caps"] == caps
    stale = "127.0.0.1:15000 was an earlier worker's, whose memory is still mapped; start this worker again"
    assert seen["successor"] == ("" if protocol == "tcp" else stale)


def test_without_a_fabric_the_start_fails(stand_ins: Path) -> None:
    ended = run(stand_ins, "nvlink", NO_FABRIC="1")
    assert "no memory with fabric handles; start nvidia-imex" in ended.stderr and ended.returncode == 1


def test_a_mooncake_without_the_allocator(stand_ins: Path, tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    for name in ("__init__.py", "engine.py"):
        (tmp_path / "mooncake" / name).write_text((stand_ins / "mooncake" / name).read_text())
    build_driver(tmp_path)
    ended = run(tmp_path, "nvlink")
    assert "Mooncake's nvlink_allocator.so cannot be used" in ended.stderr and "Traceback" not in ended.stderr


def test_workers_with_different_transports_refuse_each_other() -> None:
    args = KVArgs(Region(1 << 40, 8, 4096, 0), Region(1 << 20, 8, 64, None), "m", 16, "bf16")
    tcp, nvlink = (layout_of(args, backend=name) for name in ("mooncake", "mooncake_nvlink_intra"))
    text = layout_conflict(tcp, nvlink, me="prefill", them="decode")
    assert text is not None and "backend differs: prefill has 'mooncake', decode has 'mooncake_nvlink_intra'" in text


# ---- RDMA devices by flag, from literals: no machine of the suite has one.

HERE = ["mlx5_0", "mlx5_1", "mlx5_2"]


@pytest.mark.parametrize(
    ("text", "names"),
    [(None, ()), ("mlx5_1", ("mlx5_1",)), ("mlx5_2, mlx5_0,mlx5_2", ("mlx5_2", "mlx5_0"))],
)
def test_named_devices(text: str | None, names: tuple[str, ...]) -> None:
    assert named_devices(text, here=HERE) == names


@pytest.mark.parametrize(
    ("text", "here", "message"),
    [
        ("mlx5_0,mlx5_7", HERE, "there is no 'mlx5_7'; /sys/class/infiniband has mlx5_0, mlx5_1, mlx5_2$"),
        ("mlx5_0", [], "there is no 'mlx5_0'; /sys/class/infiniband is empty or absent$"),
        ("mlx5_0,", HERE, "'mlx5_0,' holds an empty name"),
        ("", HERE, "'' holds an empty name"),
        ("../mlx5_0", HERE, "there is no '../mlx5_0'"),
    ],
)
def test_an_absent_device_is_refused(text: str, here: list[str], message: str) -> None:
    with pytest.raises(BackendUnavailable, match=f"^--disaggregation-ib-device: {message}"):
        named_devices(text, here=here)


def test_ucx_takes_the_first_port_of_each() -> None:
    wanted = {"UCX_NET_DEVICES": "mlx5_0:1,mlx5_2:1"}
    assert ucx_settings((), {"UCX_NET_DEVICES": "eth0"}) == {}
    assert ucx_settings(("mlx5_0", "mlx5_2"), {}) == ucx_settings(("mlx5_0", "mlx5_2"), wanted) == wanted
    with pytest.raises(BackendUnavailable, match="mlx5_1 contradicts UCX_NET_DEVICES=eth0; unset one"):
        ucx_settings(("mlx5_1",), {"UCX_NET_DEVICES": "eth0"})


# ---- A GPU engine's window and polls against a link of 400 GB/s, in virtual time: the pipe must
# not run dry between two polls.

LINK_BYTES_A_S = 400e9
POST_S = 20e-6  # of this thread, for a post
PIECE_S = 4.5e-6  # for a copy that it starts
POLL_S = 2e-6
LATE_S = 60e-6  # a thread that sleeps wakes up so much later than it asked for
PAGE_BYTES = 36 * 65536  # 16 tokens of Qwen3-8B
NUM_PAGES = 16384


class Time:
    """The clock of the run, and the event that the sender thread sleeps on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def wait(self, timeout_s: float) -> None:
        self.now_s += timeout_s + LATE_S

    @contextlib.contextmanager
    def locked(self) -> Iterator[float]:
        yield self.now_s


class Copying:
    """An operation of which `left` bytes have not landed."""

    def __init__(self, size_bytes: int) -> None:
        self.left = float(size_bytes)


class Link(FakeEngine):
    """Its operations share the rate, as copies on streams of their own: those posted together end together."""

    def __init__(self, time: Time, caps: Caps) -> None:
        super().__init__()
        self.caps = caps
        self._time = time
        self._seen_s = 0.0
        self._copying: list[Copying] = []

    def post(self, peer: Any, pieces: Pieces) -> Any:
        self._time.now_s += POST_S + PIECE_S * len(pieces)
        self._advance()
        self._copying.append(Copying(pieces.size_bytes))
        return self._copying[-1]

    def poll(self, op: Any) -> OpState:
        self._time.now_s += POLL_S
        self._advance()
        return OpState.PENDING if op in self._copying else OpState.DONE

    def _advance(self) -> None:
        bytes_left = (self._time.now_s - self._seen_s) * LINK_BYTES_A_S
        self._seen_s = self._time.now_s
        while self._copying and bytes_left > 0:
            share = min(bytes_left / len(self._copying), min(op.left for op in self._copying))
            bytes_left -= share * len(self._copying)
            for op in self._copying:
                op.left -= share
            self._copying = [op for op in self._copying if op.left > 1.0]


def utilisation(caps: Caps, pages: np.ndarray) -> float:
    """Share of the link's rate at which `pages` leave, from the first to the last."""
    time = Time()
    kv = Region(1 << 20, NUM_PAGES, PAGE_BYTES, 0)
    pair = JoinedCores(
        args=KVArgs(kv, Region(1 << 50, 16, 64, None), "m", 16, "bf16"), caps=caps, pages=pages.tolist(), sends=False
    )
    engine = Link(time, caps)
    trials = Trials(caps=caps, machine="", on_gpu=True, clock=lambda: time.now_s)
    driver = EngineDriver(engine=engine, of_ranks=engine, core=pair.core, trials=trials, locked=time.locked)
    driver._event = time  # type: ignore[assignment]
    driver._peers["d"] = Connected(engine, "d")
    pair.send(pages.tolist(), row=1)
    while pair.states[0] is not KVPoll.Success:
        driver._rest(driver.step())
        assert time.now_s < 10.0
    return len(pages) * PAGE_BYTES / LINK_BYTES_A_S / time.now_s


CPU_CAPS = FakeEngine().caps
GPU_CAPS = of_gpu(replace(CPU_CAPS, max_inflight=4096, max_post_pieces=1024), inside_machine="cuda_ipc")
NEIGHBOURS = np.arange(1, 8193)
SCATTERED = np.random.default_rng(1).permutation(NUM_PAGES - 1)[:8192] + 1


@pytest.mark.parametrize("pages", [NEIGHBOURS, SCATTERED], ids=["neighbours", "scattered"])
def test_a_gpu_s_window_keeps_its_link_busy(pages: np.ndarray) -> None:
    assert utilisation(GPU_CAPS, pages) >= 0.9


def test_naps_of_a_cpu_would_let_the_link_run_dry() -> None:
    assert utilisation(replace(GPU_CAPS, longest_nap_s=CPU_CAPS.longest_nap_s), NEIGHBOURS) < 0.8
