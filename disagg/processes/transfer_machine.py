"""Checks of machine and environment for a transfer engine."""

import logging
import re
import resource
from collections.abc import Mapping
from pathlib import Path

from disagg.config import DisaggConfig, SchedulerSpec
from engine.model_files.model_config import ModelConfig
from service.flags import ConfigError
from transfer_backends.engines.environment import IB_FLAG, devices_here, named_devices, ucx_settings

log = logging.getLogger(__name__)

CAP_IPC_LOCK = 14  # linux/capability.h
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def check_transfer_machine(disagg: DisaggConfig, env: Mapping[str, str], *, on_gpu: bool) -> None:
    """Raises ConfigError, BackendUnavailable."""
    devices = named_devices(disagg.disaggregation_ib_device, here=devices_here())
    if disagg.disaggregation_transfer_backend == "nixl":
        ucx_settings(devices, env)
    if on_gpu:
        check_allocator(env)
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_rdma = any(Path("/dev/infiniband").glob("uverbs*"))
    text = memlock_warning(limit_bytes=limit_bytes, effective_capabilities=_capabilities(), has_rdma=has_rdma)
    if text is not None:
        log.warning(text)


def check_flags(disagg: DisaggConfig) -> None:
    """Raises ConfigError."""
    backend, protocol = disagg.disaggregation_transfer_backend, disagg.disaggregation_mooncake_protocol
    if backend != "mooncake" and protocol != "auto":
        raise ConfigError(
            f"--disaggregation-mooncake-protocol: {protocol} is a transport of Mooncake, and --disaggregation-transfer-backend is "
            f"{backend}; take mooncake there, or leave the protocol out"
        )
    if disagg.prefix_fetch and backend == "fake":
        raise ConfigError(
            "--prefix-fetch: --disaggregation-transfer-backend fake moves no KV; take nixl or mooncake, or leave --prefix-fetch out"
        )
    if backend == "fake" and (disagg.feature_fetch or disagg.disaggregation_mode == "encode"):
        flag = "--feature-fetch" if disagg.feature_fetch else "--disaggregation-mode encode"
        raise ConfigError(
            f"{flag}: --disaggregation-transfer-backend fake moves no features of images; take nixl or mooncake, or leave {flag} out"
        )
    if disagg.disaggregation_ib_device is not None and protocol not in ("auto", "rdma"):
        raise ConfigError(
            f"{IB_FLAG}: --disaggregation-mooncake-protocol {protocol} uses no RDMA device; take rdma, or leave one of the two out"
        )


def check_allocator(env: Mapping[str, str]) -> None:
    """Raises ConfigError for expandable segments: cuda_ipc maps only single allocations."""
    for name in ALLOCATOR_VARIABLES:
        if expandable_segments(env.get(name, "")):
            raise ConfigError(
                f"{name}: expandable_segments:True gives a KV cache that other processes cannot map, so transfers on one "
                "machine fail; take it out of the variable, or say expandable_segments:False"
            )


def expandable_segments(text: str) -> bool:
    """The last value counts."""
    words = re.findall(r"(?:^|,)\s*expandable_segments\s*:\s*(\w+)", text)
    return bool(words) and words[-1] == "True"


def memlock_warning(*, limit_bytes: int, effective_capabilities: int, has_rdma: bool) -> str | None:
    """The obstacle to pinned memory; `limit_bytes` is the soft RLIMIT_MEMLOCK."""
    if not has_rdma or limit_bytes == resource.RLIM_INFINITY or effective_capabilities >> CAP_IPC_LOCK & 1:
        return None
    return (
        f"RDMA device, but this process may pin {limit_bytes >> 10} KiB only (RLIMIT_MEMLOCK) and lacks CAP_IPC_LOCK: the "
        "transfer engine may fall back to TCP. Raise the limit: ulimit -l unlimited, docker run --ulimit memlock=-1, or "
        "LimitMEMLOCK=infinity for the node's containerd; a capability added to a container reaches root alone"
    )


def _capabilities() -> int:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1], 16) if found else 0


def check_prefix_fetch(spec: SchedulerSpec) -> None:
    """Raises ConfigError for flags without prefix transfer."""
    if not spec.disagg.prefix_fetch or spec.disagg.disaggregation_mode == "null":
        return
    if spec.engine.disable_radix_cache:
        raise ConfigError(
            "--prefix-fetch: --disable-radix-cache leaves no place for a prefix; leave one of the two out"
        )
    if spec.engine.dp_size > 1:
        raise ConfigError(
            f"--prefix-fetch: not with --dp-size {spec.engine.dp_size}: a router does not know which DP rank has a prefix"
        )


def check_feature_fetch(spec: SchedulerSpec, model: ModelConfig) -> None:
    """Raises ConfigError for models without features; warns if this worker cannot fetch."""
    if not spec.disagg.feature_fetch:
        return
    if model.vision is None:
        raise ConfigError("--feature-fetch: the model sees no images; leave it out")
    if spec.engine.pp_size > 1:
        log.warning(
            "--feature-fetch: not with --pp-size %d, whose first stage alone needs features of images and has no transfers of its own; "
            "this worker encodes all images itself",
            spec.engine.pp_size,
        )
