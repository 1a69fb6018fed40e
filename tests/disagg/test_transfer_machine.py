"""Pinned memory and the allocator, from literals; a worker that refuses at the start."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from disagg import transfer_engine
from disagg.config import DisaggConfig
from disagg.processes.transfer_machine import check_allocator, check_flags, expandable_segments, memlock_warning
from disagg.transfer_engine import kv_bytes
from service.flags import ConfigError

IPC_LOCK = 1 << 14
ALL = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limit_bytes", "capabilities", "has_rdma", "warns"),
    [
        (8 << 20, 0, True, True),
        (8 << 20, ~IPC_LOCK & (1 << 40) - 1, True, True),
        (8 << 20, IPC_LOCK, True, False),
        (ALL, 0, True, False),
        (8 << 20, 0, False, False),
    ],
)
def test_memory_that_rdma_cannot_pin(limit_bytes: int, capabilities: int, has_rdma: bool, warns: bool) -> None:
    text = memlock_warning(limit_bytes=limit_bytes, effective_capabilities=capabilities, has_rdma=has_rdma)
    assert (text is not None) == warns
    assert text is None or ("may pin 8192 KiB" in text and "LimitMEMLOCK=infinity" in text)


@pytest.mark.parametrize(
    ("text", "expandable"),
    [
        ("", False),
        ("expandable_segments:True", True),
        ("expandable_segments:False", False),
        ("max_split_size_mb:128, expandable_segments : True", True),
        ("roundup_power2_divisions:[256:1,512:2],expandable_segments:True,garbage_collection_threshold:0.8", True),
        ("expandable_segments:True,expandable_segments:False", False),
        ("not_expandable_segments:True", False),
    ],
)
def test_expandable_segments(text: str, expandable: bool) -> None:
    assert expandable_segments(text) == expandable


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_pool_that_peers_cannot_map_is_refused(name: str) -> None:
    check_allocator({name: "max_split_size_mb:128"})
    with pytest.raises(ConfigError, match=f"{name}: expandable_segments:True .* expandable_segments:False"):
        check_allocator({name: "expandable_segments:True"})


@pytest.mark.parametrize("backend", ["nixl", "fake"])
def test_a_transport_of_mooncake_for_another_backend_is_refused(backend: str) -> None:
    check_flags(DisaggConfig(disaggregation_transfer_backend=backend))
    check_flags(DisaggConfig(disaggregation_transfer_backend="mooncake", disaggregation_mooncake_protocol="tcp"))
    with pytest.raises(ConfigError, match=f"mooncake-protocol: tcp is a transport of Mooncake, .* is {backend}; take"):
        check_flags(DisaggConfig(disaggregation_transfer_backend=backend, disaggregation_mooncake_protocol="tcp"))


def test_rdma_devices_for_a_transport_without_them_are_refused() -> None:
    for protocol in ("auto", "rdma"):
        check_flags(mooncake_config(protocol))
    with pytest.raises(
        ConfigError, match=r"--disaggregation-ib-device: .* nvlink uses no RDMA device; take rdma, or leave"
    ):
        check_flags(mooncake_config("nvlink"))


def mooncake_config(protocol: str) -> DisaggConfig:
    return DisaggConfig(
        disaggregation_transfer_backend="mooncake",
        disaggregation_mooncake_protocol=protocol,
        disaggregation_ib_device="mlx5_0",
    )


MOONCAKE = "--disaggregation-transfer-backend=mooncake"
OVER_NVLINK = "--disaggregation-mooncake-protocol=nvlink_intra"


@pytest.mark.parametrize(
    ("flags", "env", "text"),
    [
        (
            ["--device=cuda"],
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            "PYTORCH_ALLOC_CONF: expandable_segments",
        ),
        (["--device=cpu", MOONCAKE, OVER_NVLINK], {}, "protocol is nvlink_intra, but the KV cache is in host memory"),
        (
            ["--device=cpu", "--disaggregation-ib-device=tandem_9"],
            {},
            "--disaggregation-ib-device: there is no 'tandem_9'; /sys/class/infiniband",
        ),
    ],
)
def test_a_worker_says_so_before_it_imports_torch(
    flags: list[str], env: dict[str, str], text: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError")
    argv = [sys.executable, "-m", "deploy", "serve", "--port=0", "--disaggregation-mode=decode", *flags]
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith("MC_")
    }  # an engine of this process set some
    done = subprocess.run(
        argv, env={**ours, **env, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0 and text in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("mode", "backend", "protocol", "allocator"),
    [
        ("null", "mooncake", "nvlink", "torch"),
        ("prefill", "nixl", "nvlink", "torch"),
        ("prefill", "mooncake", "nvlink_intra", "torch"),
        ("prefill", "mooncake", "nvlink", "the fabric of cuda:1"),
    ],
)
def test_the_pool_of_an_nvlink_fabric_comes_from_its_allocator(
    monkeypatch: pytest.MonkeyPatch, mode: str, backend: str, protocol: str, allocator: str
) -> None:
    asked = list[str]()
    monkeypatch.setattr(transfer_engine, "zeroed_bytes", lambda size, device: asked.append("torch"))
    monkeypatch.setattr(transfer_engine, "protocol_here", lambda wish, *, device: wish if device == 1 else "tcp")
    monkeypatch.setattr(transfer_engine, "CudaContext", lambda ordinal: f"the fabric of cuda:{ordinal}")
    monkeypatch.setattr(
        transfer_engine, "FabricMemory", lambda context: SimpleNamespace(allocate=lambda size: asked.append(context))
    )
    monkeypatch.setattr(transfer_engine, "tensor_at", lambda at, size: torch.ones(1))
    flags = {"transfer_backend": backend, "mooncake_protocol": protocol, "mode": mode}
    disagg = DisaggConfig(**{f"disaggregation_{name}": value for name, value in flags.items()})
    kv_bytes(disagg, 64, torch.device("cuda", 1))
    assert asked == [allocator]
