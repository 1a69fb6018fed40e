"""Cluster flags of `tandem up`; others go to workers and router."""

from dataclasses import dataclass
from typing import Any

from service.flags import FlagSet, flag

MAX_WORKERS_PER_ROLE = 64


def _size(role: str, name: str) -> Any:
    return flag(None, f"--{name} of {role} workers; default: --{name}", least=1, most=64)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(FlagSet):
    """A cluster on loopback, except for the router's `host`."""

    prefill: int = flag(1, "number of prefill workers", least=1, most=MAX_WORKERS_PER_ROLE)
    decode: int = flag(1, "number of decode workers", least=1, most=MAX_WORKERS_PER_ROLE)
    transfer_backend: str = flag("nixl", "engine that moves the KV cache", choices=("nixl", "mooncake", "fake"))
    prefill_tp_size: int | None = _size("prefill", "tp-size")
    prefill_pp_size: int | None = _size("prefill", "pp-size")
    prefill_dp_size: int | None = _size("prefill", "dp-size")
    prefill_ep_size: int | None = _size("prefill", "ep-size")
    decode_tp_size: int | None = _size("decode", "tp-size")
    decode_pp_size: int | None = _size("decode", "pp-size")
    decode_dp_size: int | None = _size("decode", "dp-size")
    decode_ep_size: int | None = _size("decode", "ep-size")
    mixed: int = flag(
        0,
        "number of unified workers beside them (the router's --mixed)",
        least=0,
        most=MAX_WORKERS_PER_ROLE,
        special={0: "none"},
    )
    encode: int = flag(
        0,
        "number of encoder workers, which compute images for the others (--feature-fetch)",
        least=0,
        most=MAX_WORKERS_PER_ROLE,
        special={0: "none"},
    )
    unified: bool = flag(False, "start one unified worker instead, without router and transfers")
    host: str = flag("127.0.0.1", "address that the router listens on (with --unified: the worker)")
    port: int = flag(
        8000,
        "port that the router listens on (with --unified: the worker)",
        least=0,
        most=65535,
        special={0: "a free one"},
    )
    ready_file: str | None = flag(
        None, "file to write, as JSON, once all processes are healthy: router, workers (role, url, pid)"
    )
    gpu_ids: tuple[str, ...] = flag(
        (),
        "GPUs for the engines, in turn, one for each rank: places among those that CUDA_VISIBLE_DEVICES shows, or UUIDs; default: all",
    )
    share_gpus: bool = flag(
        False,
        "more engines than GPUs: put several on one, side by side by MPS where it is, and divide --mem-fraction-static",
    )
    run_dir: str | None = flag(None, "directory of the log files; default: a new one under the temp directory")
    start_timeout_s: float = flag(600.0, "time for all processes to become healthy", unit="s", above=0)
