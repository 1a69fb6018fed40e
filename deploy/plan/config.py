"""Flags of `tandem plan`."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from deploy.plan.gpus import GPUS
from engine.config import flag
from engine.core.policy import POLICIES as SCHEDULE_POLICIES
from router.config import POLICIES
from service.flags import ConfigError


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """One plan: which model on what, for which requests, how good they must be, which clusters are tried."""

    model_path: str = flag("", "directory with the model's config.json (nothing else is read), or that file itself")
    gpu: str | None = flag(None, "GPU of each worker, from the table of known ones", choices=tuple(GPUS))
    gpu_profile: str | None = flag(
        None,
        "JSON of measured step times (--save-profile writes one), or of a GPU that is in no table (docs/planning.md)",
    )
    fit: tuple[str, ...] = flag(
        (), "measure step times from these reports of `tandem bench --output` (docs/planning.md says which to make)"
    )
    fit_pair: str | None = flag(
        None, "with --fit: measure the hand-over from this report of a unified worker and, by --compare, a pair"
    )
    save_profile: str | None = flag(None, "write what --fit measured here")
    gpu_memory_gb: float | None = flag(None, "memory of a worker in GB (of 10^9 bytes); default: the GPU's")
    transfer_gb_s: float | None = flag(
        None, "bandwidth of each worker's network port in GB/s; default: as measured (--fit-pair), or the GPU table's"
    )
    transfer_latency_ms: float | None = flag(
        None, "from a transfer's last byte sent to its arrival; default: 0.5, or as measured (--fit-pair)"
    )
    control_latency_ms: float = flag(1.0, "one message between a prefill and a decode worker")
    request_overhead_ms: float | None = flag(
        None, "HTTP, router and tokenizer before a request reaches a scheduler; default: 5, or as measured"
    )
    host_cores: float | None = flag(
        None, "all workers compute on one machine with so many cores (CPU workers); default: each has its own device"
    )
    step_cores: int = flag(1, "with --host-cores: cores that a step takes (a worker's --num-threads)")
    host_request_ms: float = flag(0.0, "with --host-cores: CPU time of router, HTTP and tokenizers, a request")
    host_token_ms: float = flag(0.0, "with --host-cores: CPU time of HTTP and router, an output token")

    compute_efficiency: float | None = flag(
        None, "part of the data sheet's FLOP/s that a prefill reaches; default: the profile's, or 0.55"
    )
    memory_efficiency: float | None = flag(
        None, "part of the data sheet's bandwidths that a decode step reaches; default: the profile's, or 0.75"
    )
    step_overhead_ms: float | None = flag(
        None, "what each step takes beside the model: launches, sampling, scheduler; default: the profile's, or 2"
    )
    all_reduce_us: float | None = flag(
        None, "with --tp-size: what an all-reduce takes beside its bytes; default: the profile's, or 10"
    )

    trace: str | None = flag(
        None, "requests of this trace: JSON lines of timestamp (ms), input_length, output_length, hash_ids; may be .gz"
    )
    input_len: int = flag(2048, "without a trace: longest prompt in tokens")
    output_len: int = flag(256, "without a trace: longest answer in tokens")
    random_range_ratio: float = flag(0.5, "without a trace: lengths are drawn from [RATIO * longest, longest]")
    shared_prefix_len: int = flag(0, "without a trace: tokens at the start of each prompt that all of its group share")
    shared_prefix_groups: int = flag(1, "without a trace: groups of requests with a common prefix")
    num_requests: int = flag(300, "requests of each run; of a trace: from its middle, caches warm with those before")
    seed: int = flag(0, "seed of lengths and arrivals")

    slo_ttft_ms: float = flag(2000.0, "a good request has its first token after so long at most")
    slo_tpot_ms: float = flag(50.0, "a good request's later tokens take so long at most, on average")
    slo_itl_ms: float | None = flag(
        None, "... and of its gaps between two tokens --slo-percent are no longer than this; default: any gap is good"
    )
    slo_percent: float = flag(90.0, "of all requests so many must be good")

    layouts: tuple[str, ...] = flag((), "clusters to try: 2P3D, 4U (unified), 4U-mixed; default: by --num-workers")
    num_workers: int = flag(
        4, "default layouts: so many workers, split into prefill and decode in every way, or unified"
    )
    tp_size: tuple[int, ...] = flag(
        (), "GPUs of each worker (tensor parallelism); of several the layouts are tried with each; default: 1"
    )
    rates: tuple[float, ...] = flag((), "try these rates alone (requests a second and GPU); default: search the best")
    total_rate: float | None = flag(None, "also say how many GPUs serve so many requests a second")

    policy: str = flag("least_load", "how the router chooses who computes a prompt (docs/router.md)", choices=POLICIES)

    page_size: int = flag(64, "tokens in a KV page (larger ones plan faster)")
    chunked_prefill_size: int = flag(8192, "most prompt tokens in one step; -1: no chunking")
    mixed_chunk_size: int = flag(1024, "the same of -mixed layouts, where decodes ride along in prefill steps")
    max_running_requests: int = flag(256, "requests in the running batch")
    mem_fraction_static: float = flag(0.85, "share of the memory that weights leave which holds KV")
    max_total_tokens: int | None = flag(None, "KV capacity of a worker in tokens; default: by --mem-fraction-static")
    schedule_policy: str = flag("fcfs", "order of the waiting queue", choices=SCHEDULE_POLICIES)
    schedule_conservativeness: float = flag(1.0, "above 1: fewer requests run at once, fewer are retracted")
    disable_overlap_schedule: bool = flag(False, "each step is collected before the next is launched")
    disable_radix_cache: bool = flag(False, "do not reuse the KV of equal prefixes")

    jobs: int = flag(2, "runs at the same time, each a process")
    output: str | None = flag(None, "write every run's figures as JSON here")
    plot: str | None = flag(None, "write a picture of goodput against rate here (.png or .svg; needs matplotlib)")
    disable_progress: bool = flag(False, "no progress bar")


POSITIVE = (
    "slo_ttft_ms",
    "slo_tpot_ms",
    "slo_itl_ms",
    "gpu_memory_gb",
    "transfer_gb_s",
    "total_rate",
    "host_cores",
    "step_cores",
    "input_len",
    "output_len",
    "shared_prefix_groups",
    "num_requests",
    "jobs",
)
NOT_NEGATIVE = (
    "transfer_latency_ms",
    "control_latency_ms",
    "request_overhead_ms",
    "step_overhead_ms",
    "all_reduce_us",
    "host_request_ms",
    "host_token_ms",
    "shared_prefix_len",
)


def check_plan(config: PlanConfig) -> None:
    """Raise `ConfigError` for the first flag that cannot be honoured."""
    if not config.model_path:
        raise ConfigError("--model-path: say which model; a directory with its config.json is enough")
    if config.fit and config.gpu_profile is not None:
        raise ConfigError("--fit: step times come from --gpu-profile already; give one of them")
    if not (config.gpu or config.fit or config.gpu_profile):
        raise ConfigError(f"--gpu: say what the workers run on ({', '.join(GPUS)}), or give --gpu-profile or --fit")
    if config.save_profile and not config.fit:
        raise ConfigError("--save-profile: needs --fit; there is nothing measured to save")
    if config.fit_pair and not config.fit:
        raise ConfigError("--fit-pair: needs --fit; what a pair takes longer is told by a unified worker's times")
    for name in ("host_request_ms", "host_token_ms"):
        if getattr(config, name) and config.host_cores is None:
            raise ConfigError(f"--{name.replace('_', '-')}: needs --host-cores; nothing is shared without it")
    for name in POSITIVE:
        _require(name, getattr(config, name), lambda value: value > 0, "must be greater than 0")
    for name in NOT_NEGATIVE:
        _require(name, getattr(config, name), lambda value: value >= 0, "must be at least 0")
    for name in ("compute_efficiency", "memory_efficiency"):
        _require(name, getattr(config, name), lambda value: 0 < value <= 1, "must be above 0 and at most 1")
    _require("random_range_ratio", config.random_range_ratio, lambda value: 0 <= value <= 1, "must be 0 to 1")
    _require("slo_percent", config.slo_percent, lambda value: 0 < value <= 100, "must be above 0 and at most 100")
    _require("num_workers", config.num_workers, lambda value: 2 <= value <= 64, "must be 2 to 64")
    for tp in config.tp_size:
        _require("tp_size", tp, lambda value: 1 <= value <= 32, "must be 1 to 32")
    for rate in config.rates:
        _require("rates", rate, lambda value: value > 0, "must be greater than 0")
    if config.num_requests < 10:
        raise ConfigError(f"--num-requests: fewer than 10 say nothing about a percentile, got {config.num_requests}")


def _require(name: str, value: float | None, holds: Callable[[float], bool], message: str) -> None:
    if value is not None and not (math.isfinite(value) and holds(value)):
        raise ConfigError(f"--{name.replace('_', '-')}: {message}, got {value}")
