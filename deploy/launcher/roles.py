"""Flags of workers by role. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from engine.config import EngineConfig
from engine.model_files.model_config import ModelConfig
from engine.parallel.layout import check_layout, common_units
from service.flags import ConfigError, FlagSet, flag

# ---- Cluster flags of `tandem up`; others go to workers and router.

MAX_WORKERS_PER_ROLE = 64
RESTARTS = ("always", "never")
MPS_PREFILL_PERCENTAGE = 75  # else kernels of a chunk hold the GPU, and a decode step waits for the chunk


def _size(role: str, name: str) -> Any:
    return flag(None, f"--{name} of {role} workers; default: --{name}", least=1, most=64)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(FlagSet):
    """A cluster on loopback, except for the router's `host`."""

    topic = "cluster"

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
    mps_prefill_percentage: int | None = flag(
        None,
        "with --share-gpus and MPS: multiprocessors that a prefill worker may use at once of a GPU that it shares with decodes, in "
        f"percent (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE); 100: all; default: {MPS_PREFILL_PERCENTAGE}",
        least=1,
        most=100,
    )
    run_dir: str | None = flag(None, "directory of the log files; default: a new one under the temp directory")
    # Always by default: most clusters have one worker of a role, and nothing is served without it.
    restart: str = flag(
        "always",
        "start a process again after it died, with a growing pause, at its address; never: the others go on without it",
        choices=RESTARTS,
    )
    start_timeout_s: float = flag(600.0, "time for all processes to become healthy", unit="s", above=0)


# ---- roles

COUNTED = ("tp_size", "pp_size", "dp_size")  # their product is the number of ranks
SIZES = (*COUNTED, "ep_size")
OF_DP_ATTENTION = ("enable_dp_attention", "enable_prefill_delayer")
OF_PDMUX = ("enable_pdmux", "pdmux_itl_s")
# Fields of EngineConfig that apply to encoder workers, which have one rank and no text model.
OF_ENCODERS = (
    *("model_path", "revision", "served_model_name", "load_format", "dtype", "weight_version"),
    *("device", "mem_fraction_static", "enable_memory_saver", "vlm_cache_size_mb", "num_threads"),
    *("stream", "context_length", "max_running_requests", "max_queued_requests", "max_prefill_tokens"),
    *("random_seed", "decode_log_interval", "watchdog_timeout_s"),
)


@dataclass(frozen=True, kw_only=True)
class RoleFlags:
    """Arguments of `tandem serve` for a role's workers, and the ranks of each."""

    args: Sequence[str] = ()
    ranks: int = 1


def values_by_role(config: ClusterConfig, given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Role -> flags by field. Raises ConfigError.

    Encoder workers get no flags of ranks or text model, prefill none of pdmux. A role without
    stages gets no --pp-layer-partition, one DP rank no DP attention, if the other role has them.
    """
    own = {role: _own_sizes(config, role) for role in ("prefill", "decode")}
    if config.unified:
        if config.encode:
            raise ConfigError(f"--encode {config.encode}: --unified starts one worker alone; leave one of them out")
        for role, name, size in ((role, name, size) for role, sizes in own.items() for name, size in sizes.items()):
            raise ConfigError(f"--{role}-{_option(name)} {size}: --unified has no such worker; give --{_option(name)}")
        return {"unified": dict(given)}
    found = {role: {**given, **sizes} for role, sizes in own.items()}
    for name in OF_PDMUX:
        found["prefill"].pop(name, None)
    stages = {role: values.get("pp_size", 1) for role, values in found.items()}
    for role, values in found.items():
        if stages[role] == 1 < max(stages.values()):
            values.pop("pp_layer_partition", None)
    dp_sizes = [values.get("dp_size", 1) for values in found.values()]
    for values in found.values():
        if values.get("dp_size", 1) == 1 < max(dp_sizes):
            for name in OF_DP_ATTENTION:
                values.pop(name, None)
    return _with_encoders(config, found, given) if config.encode else found


def _with_encoders(
    config: ClusterConfig, found: dict[str, dict[str, Any]], given: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Add the flag, also for decode, which may switch to prefill."""
    if config.transfer_backend == "fake":
        raise ConfigError(
            f"--encode {config.encode}: --transfer-backend fake moves no features of images; take nixl or mooncake"
        )
    asking = {role: {**values, "feature_fetch": True} for role, values in found.items()}
    of_text = {field.name for field in fields(EngineConfig)} - set(OF_ENCODERS)
    return {**asking, "encode": {name: value for name, value in given.items() if name not in of_text}}


def num_ranks(values: Mapping[str, Any]) -> int:
    tp, pp, dp = (values.get(name, 1) for name in COUNTED)
    return int(tp * pp * (1 if values.get("enable_dp_attention") else dp))


def _dp_attention_size(values: Mapping[str, Any]) -> int:
    return int(values.get("dp_size", 1)) if values.get("enable_dp_attention") else 1


def units_between(model: ModelConfig, by_role: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Common --kv-units, if roles divide KV heads differently."""
    sizes = {int(values.get("tp_size", 1)) // _dp_attention_size(values) for values in by_role.values()}  # of attention
    given = any(values.get("kv_units") is not None for values in by_role.values())
    return None if given or len(sizes) == 1 else common_units(model, tp_sizes=sorted(sizes))


def check_role(config: ClusterConfig, role: str, values: Mapping[str, Any], model: ModelConfig) -> None:
    """Raises ConfigError."""
    try:
        check_layout(
            model,
            tp_size=values.get("tp_size", 1),
            pp_size=values.get("pp_size", 1),
            dp_size=_dp_attention_size(values),
            ep_size=values.get("ep_size", 1),
            partition=values.get("pp_layer_partition", ()),
            kv_units=values.get("kv_units"),
            reduce_units=values.get("reduce_units", 0),
        )
    except ConfigError as error:
        own = _own_sizes(config, role)
        text = re.sub(
            r"--([tpde]p)-size", lambda m: f"--{role}-{m[1]}-size" if f"{m[1]}_size" in own else m[0], str(error)
        )
        raise ConfigError(text) from None


def _own_sizes(config: ClusterConfig, role: str) -> dict[str, int]:
    found = {name: getattr(config, f"{role}_{name}", None) for name in SIZES}
    return {name: size for name, size in found.items() if size is not None}


def _option(name: str) -> str:
    return name.replace("_", "-")
