"""Choosing an engine, the message when its library is missing, and the end of processes that used one."""

import subprocess
import sys

import pytest

from tests.transfer.rig import ROOT
from transfer_backends.contract import BackendUnavailable
from transfer_backends.control_port import advertised_host
from transfer_backends.engines.registry import BACKENDS, make_engine


@pytest.mark.parametrize(
    ("backend", "modules", "text"),
    [
        ("nixl", ["nixl", "nixl_cu12", "nixl_cu13"], "pip install nixl-cu12"),
        ("mooncake", ["mooncake", "mooncake.engine"], "pip install mooncake-transfer-engine-non-cuda"),
    ],
)
def test_missing_library(monkeypatch: pytest.MonkeyPatch, backend: str, modules: list[str], text: str) -> None:
    for name in modules:
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
