"""Choosing an engine, the message when its library is missing, and the end of processes that used one."""

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.transfer.rig import ROOT
from transfer_backends.contract import BackendUnavailable
from transfer_backends.control_port import advertised_host
from transfer_backends.engines.environment import defaults_inside, quiet
from transfer_backends.engines.registry import BACKENDS, make_engine
from transfer_backends.engines.wheels import MOONCAKE, NIXL, torch_cuda_major, wheel_of

MODULES = {"nixl": ["nixl", "nixl_cu12", "nixl_cu13"], "mooncake": ["mooncake", "mooncake.engine"]}
CUDA_MAJORS = {
    "2.10.0": 12,
    "2.11.0": 13,
    "2.13.0": 13,
    "2.14.1+cu130": 13,
    "2.11.0+cu128": 12,
    "2.13.0+cpu": None,
    "2.13.0+rocm7.1": None,
    "2.13.0a0+gitabc": None,
    None: None,
}


@pytest.mark.parametrize(("torch", "major"), CUDA_MAJORS.items())
def test_the_cuda_that_a_torch_brings(torch: str | None, major: int | None) -> None:
    assert torch_cuda_major(torch) == major


def test_a_wheel_for_each_cuda() -> None:
    torches = ["2.13.0+cpu", "2.10.0", "2.13.0", "3.1.0+cu140"]
    assert [wheel_of(NIXL, torch) for torch in torches] == ["nixl-cu12", "nixl-cu12", "nixl-cu13", "nixl-cu13"]
    plain = "mooncake-transfer-engine"
    assert [wheel_of(MOONCAKE, t) for t in torches] == [
        f"{plain}-non-cuda",
        plain,
        f"{plain}-cuda13",
        f"{plain}-cuda13",
    ]


@pytest.mark.parametrize(
    ("backend", "torch", "text"),
    [
        ("nixl", "2.13.0+cpu", r"pip install nixl-cu12 \(for torch 2.13.0\+cpu\)"),
        ("nixl", "2.13.0", r"pip install nixl-cu13 \(for torch 2.13.0\)"),
        ("mooncake", "2.13.0+cpu", "pip install mooncake-transfer-engine-non-cuda .* libcurl4 "),
        ("mooncake", "2.13.0", "pip install mooncake-transfer-engine-cuda13 .* libcurl4 ibverbs-providers "),
    ],
)
def test_missing_library(monkeypatch: pytest.MonkeyPatch, backend: str, torch: str, text: str) -> None:
    monkeypatch.setattr(f"transfer_backends.engines.{backend}.installed_torch", lambda: torch)
    for name in MODULES[backend]:
        for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, name, None)  # what a missing module looks like to `import`
    with pytest.raises(BackendUnavailable, match=text) as caught:
        make_engine(backend)
    assert "\n" not in str(caught.value)


def test_unknown_backend() -> None:
    with pytest.raises(BackendUnavailable, match="'rdma' is not one of nixl, mooncake, fake"):
        make_engine("rdma")


@pytest.mark.parametrize("backend", BACKENDS)
def test_process_ends_with_its_own_status_and_no_noise(backend: str) -> None:
    code = f"from transfer_backends.engines.registry import make_engine; e = make_engine({backend!r}); e.register([]); e.close(); raise SystemExit(7)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, b"", b"")


def test_importing_the_managers_loads_no_torch_and_no_engine() -> None:
    code = (
        "import sys, transfer_backends.prefill.manager, transfer_backends.decode.manager, "
        "transfer_backends.engines.registry; "
        "print([m for m in ('torch', 'nixl_cu12', 'mooncake') if m in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60, check=True)
    assert ended.stdout == b"[]\n"


def test_wildcard_is_not_advertised() -> None:
    assert advertised_host("127.0.0.1") == "127.0.0.1"
    assert advertised_host("0.0.0.0") not in ("0.0.0.0", "")


@pytest.mark.parametrize(("host", "inherited"), [("127.0.0.1", None), ("127.0.0.1", "lo"), ("192.0.2.1", "lo")])
def test_the_address_of_one_engine_is_no_setting_of_later_processes(
    host: str, inherited: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker on loopback binds no other device; a process that this one starts may be on another machine's network."""
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    if inherited is not None:
        monkeypatch.setenv("UCX_NET_DEVICES", inherited)
    before = listening()
    engine = make_engine("nixl", host=host)
    assert {address for address, _ in listening() - before} == {"127.0.0.1"}
    engine.close()
    assert os.environ.get("UCX_NET_DEVICES") == inherited
    assert (f"address is {host}: KV reaches no other machine; unset it" in caplog.text) == (host == "192.0.2.1")


def listening() -> set[tuple[str, int]]:
    sockets = psutil.Process().net_connections("inet")
    return {tuple(sock.laddr) for sock in sockets if sock.status == psutil.CONN_LISTEN}


# ---- Output that engine libraries print at their start is dropped, and nothing else, also when ranks of one process start at once.


@pytest.mark.parametrize("first_leaves_first", [True, False])
def test_a_file_has_all_but_what_overlapping_blocks_drop(tmp_path: Path, first_leaves_first: bool) -> None:
    path = tmp_path / "out"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    with contextlib.closing(os.fdopen(fd, "wb", buffering=0)) as out:
        out.write(b"before ")
        first, second = quiet(fd), quiet(fd)
        first.__enter__()
        second.__enter__()
        out.write(b"dropped ")
        for block in (first, second) if first_leaves_first else (second, first):
            out.write(b"dropped, too ")
            block.__exit__(None, None, None)
        out.write(b"after")
    assert path.read_bytes() == b"before after"


def test_each_of_several_threads_sees_its_settings() -> None:
    """Ranks may start their engines at once."""

    def enter(number: int) -> str | None:
        with defaults_inside({"TANDEM_TEST": "set"}):
            os.sched_yield()
            return os.environ.get("TANDEM_TEST")

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(enter, range(2000))) == {"set"}
    assert "TANDEM_TEST" not in os.environ
