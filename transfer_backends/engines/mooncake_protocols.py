"""Choice of Mooncake's transport by flag, environment and machine. Pure.

  tcp           anywhere
  rdma          with an RDMA device
  nvlink_intra  GPUs of one machine, by CUDA IPC: memory of cudaMalloc
  nvlink        GPUs of an NVLink fabric: memory with fabric handles (trial_memory.py)

Mooncake tests only if a variable exists, and MC_FORCE_TCP wins. Wheels have `nvlink_intra` on
x86_64, `nvlink` on aarch64 (0.3.14), and silently replace a transport not built in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from transfer_backends.contract import BackendUnavailable, Caps

FLAG = "--disaggregation-mooncake-protocol"
FORCED_BY = {  # in Mooncake's own order
    "MC_FORCE_TCP": "tcp",
    "MC_INTRANODE_NVLINK": "nvlink_intra",
    "MC_INTRA_NVLINK": "nvlink_intra",
    "MC_FORCE_MNNVL": "nvlink",
    "MC_FORCE_HCA": "rdma",
}
BUILT_IN = {"nvlink_intra": "SUPPORT_INTRA_NVLINK", "nvlink": "SUPPORT_MNNVL"}  # constants of mooncake.engine
WHEEL_WITH = {"nvlink_intra": "x86_64", "nvlink": "aarch64"}
NEEDS_FABRIC = "nvlink"  # its memory comes from trial_memory.py
ELSE_NIXL = "or for NVLink within a machine use --disaggregation-transfer-backend nixl (UCX's cuda_ipc)"


@dataclass(frozen=True)
class Machine:
    has_hca: bool
    on_gpu: bool
    built_in: Callable[[str], bool]
    has_fabric: Callable[[], bool]


def choose(asked: str, env: Mapping[str, str], machine: Machine) -> str:
    """Raises BackendUnavailable."""
    protocol, because = _wish(asked, env, has_hca=machine.has_hca)
    if (lack := _lack(protocol, machine)) is not None:
        raise BackendUnavailable(f"transfer backend mooncake: {because}, but {lack}")
    return protocol


def settings(protocol: str, *, asked: str) -> dict[str, str]:
    if protocol == "rdma" and asked == "auto":
        return {}  # it finds the devices itself
    return {next(name for name, forced in FORCED_BY.items() if forced == protocol): "1"}


def _wish(asked: str, env: Mapping[str, str], *, has_hca: bool) -> tuple[str, str]:
    forced = [name for name in FORCED_BY if name in env]
    if asked == "auto":
        if forced:
            return FORCED_BY[forced[0]], f"{forced[0]} is set"
        return ("rdma" if has_hca else "tcp"), f"{FLAG} is auto"
    for name in forced:
        if FORCED_BY[name] != asked:
            raise BackendUnavailable(
                f"transfer backend mooncake: {FLAG} {asked} contradicts {name} in the environment; unset {name}"
            )
    return asked, f"{FLAG} is {asked}"


def _lack(protocol: str, machine: Machine) -> str | None:
    if protocol == "rdma" and not machine.has_hca:
        return "there is no RDMA device (/sys/class/infiniband); give this worker one, or take tcp"
    if protocol in ("rdma", "tcp"):
        return None
    if not machine.on_gpu:
        return "the KV cache is in host memory, which NVLink does not reach; start with --device cuda, or take tcp"
    if not machine.built_in(BUILT_IN[protocol]):
        other = next(name for name in BUILT_IN if name != protocol)
        instead = f"take {other}, which is, " if machine.built_in(BUILT_IN[other]) else ""
        return f"{protocol} is not built into this Mooncake (its wheels for {WHEEL_WITH[protocol]} with CUDA have it); {instead}{ELSE_NIXL}"
    if protocol == NEEDS_FABRIC and not machine.has_fabric():
        return f"this GPU gives no memory with fabric handles; start nvidia-imex on every machine of the NVLink fabric, {ELSE_NIXL}"
    return None


# ---- Engine limits for NVLink's 400 GB/s, where a CPU-sized window lasts only 0.2 ms.


def of_gpu(caps: Caps, *, inside_machine: str) -> Caps:
    return replace(
        caps,
        max_inflight_bytes=1 << 30,
        max_post_bytes=128 << 20,
        max_piece_bytes=64 << 20,
        full_window_s=0.0,
        longest_nap_s=0.0001,
        inside_machine=inside_machine,
    )
