"""Flags of `tandem plan`."""

import math
from dataclasses import dataclass
from typing import Any

from engine.config import MAX_DRAFT_TOKENS, MAX_PAGE_SIZE, SPECULATIVE_ALGORITHMS
from engine.core.policy import POLICIES as SCHEDULE_POLICIES
from engine.flags.speculation import NGRAM
from planner.step_time import GPUS
from router.config import POLICIES, ROUTES, RouterConfig
from service.flags import ConfigError, FlagSet, flag


def _positive(default: float | tuple[float, ...] | None, help: str, *, unit: str | None = None) -> Any:
    return flag(default, help, unit=unit, above=0, below=math.inf)


def _seconds(default: float | None, help: str) -> Any:
    return flag(default, help, unit="s", least=0, below=math.inf)


@dataclass(frozen=True, kw_only=True)
class HardwareFlags(FlagSet):
    topic = "hardware"

    model_path: str = flag(
        "", "directory with the model's config.json (nothing else is read), that file itself, or a model of the hub"
    )
    gpu: str | None = flag(
        None,
        "GPU of each worker, from the table of known GPUs; H200 as it was measured, others by their data sheets",
        choices=tuple(GPUS),
    )
    gpu_profile: str | None = flag(
        None,
        "JSON of measured step times (--save-profile writes one), or of a GPU that is in no table (docs/planning.md)",
    )
    fit: tuple[str, ...] = flag(
        (), "measure step times from these reports of `tandem bench --output` (docs/planning.md says which to make)"
    )
    fit_pair: str | None = flag(
        None,
        "with --fit: measure the hand-over from this report of `tandem bench --compare` over a unified worker and a pair",
    )
    save_profile: str | None = flag(None, "file to write with what --fit measured")
    gpu_memory_gb: float | None = _positive(
        None, "memory of a GPU, in units of 10^9 bytes; default: from the GPU table", unit="GB"
    )
    transfer_gb_s: float | None = _positive(
        None,
        "bandwidth of each GPU's network port; default: as measured (--fit-pair), or from the GPU table",
        unit="GB/s",
    )
    transfer_latency_s: float | None = _seconds(
        None, "time between sending and arrival of a transfer's last byte; default: as measured (--fit-pair), or 0.0005"
    )
    control_latency_s: float = _seconds(0.001, "latency of a message between a prefill and a decode worker")
    request_overhead_s: float | None = _seconds(
        None, "time in HTTP, router and tokenizer before a request reaches a scheduler; default: as measured, or 0.005"
    )
    host_cores: float | None = _positive(
        None,
        "cores of the one machine that all workers compute on (CPU workers); default: each worker has its own device",
    )
    worker_cores: int | None = flag(
        None,
        "with --host-cores: cores of its own that each prefill and decode worker is bound to; default: all go anywhere",
        least=1,
    )
    step_cores: int = flag(1, "with --host-cores: cores that a step uses (a worker's --num-threads)", least=1)
    host_request_time_s: float = _seconds(0.0, "with --host-cores: CPU time of router, HTTP and tokenizers per request")
    host_token_time_s: float = _seconds(0.0, "with --host-cores: CPU time of HTTP and router per output token")

    compute_efficiency: float | None = flag(
        None,
        "share of the data sheet's FLOP/s that a prefill reaches; default: the profile's, the H200's as measured, or 0.55",
        above=0,
        most=1,
    )
    memory_efficiency: float | None = flag(
        None,
        "share of the data sheet's bandwidths that a decode step reaches; default: the profile's, or 0.75",
        above=0,
        most=1,
    )
    step_overhead_s: float | None = _seconds(
        None, "time of a step beside the model (launches, sampling, scheduler); default: the profile's, or 0.002"
    )
    all_reduce_overhead_s: float | None = _seconds(
        None, "with --tp-size: time of an all-reduce beside its bytes; default: the profile's, or 0.00001"
    )


@dataclass(frozen=True, kw_only=True)
class LoadFlags(FlagSet):
    topic = "load"

    trace: str | None = flag(
        None, "file of requests, as JSON lines of timestamp (ms), input_length, output_length, hash_ids; may be .gz"
    )
    input_len: int = flag(2048, "without --trace: longest prompt, in tokens", least=1)
    output_len: int = flag(256, "without --trace: longest answer, in tokens", least=1)
    random_range_ratio: float = flag(
        0.5, "without --trace: lengths are drawn from [RATIO * longest, longest]", least=0, most=1
    )
    shared_prefix_len: int = flag(
        0, "without --trace: tokens at the start of each prompt that its group shares", least=0
    )
    shared_prefix_groups: int = flag(1, "without --trace: groups of requests with a common prefix", least=1)
    num_requests: int | None = flag(
        None,
        "requests per run; taken from the middle of a trace, with caches warmed by the requests before them; default: "
        "300, with --request-rate as many as --slo-ttft needs, up to 1000",
        least=10,
    )
    seed: int = flag(0, "seed of lengths and arrivals")


@dataclass(frozen=True, kw_only=True)
class LimitFlags(FlagSet):
    topic = "limits"

    slo_ttft_s: float = _positive(2.0, "longest time to first token of a good request", unit="s")
    slo_tpot_s: float = _positive(0.05, "longest mean time per later token of a good request", unit="s")
    slo_itl_s: float | None = _positive(
        None,
        "longest inter-token latency, at --slo-percent of its tokens, of a good request; default: no limit",
        unit="s",
    )
    slo_percent: float = flag(90.0, "share of requests that must be good", unit="percent", above=0, most=100)


@dataclass(frozen=True, kw_only=True)
class LayoutFlags(FlagSet):
    topic = "layouts"

    layouts: tuple[str, ...] = flag((), "clusters to try: 2P3D, 4U (unified), 4U-mixed; default: by --num-workers")
    num_workers: int | None = flag(
        None,
        "workers of the default layouts, which split them into prefill and decode in every way, or keep them unified; "
        "with --request-rate: at most; default: 4, with --request-rate 8",
        least=2,
        most=64,
    )
    request_rate: float | None = _positive(
        None, "requests per second of the whole cluster: find the smallest one that serves them within the limits"
    )
    tp_size: tuple[int, ...] = flag(
        (),
        "GPUs per worker (tensor parallelism); layouts are tried with each of several sizes; default: 1",
        least=1,
        most=32,
    )
    rates: tuple[float, ...] = _positive(
        (), "try these rates alone, in requests per second and GPU; default: search the best"
    )
    total_rate: float | None = _positive(None, "also say how many GPUs serve this many requests per second")

    route: str = flag(
        RouterConfig.route,
        "where requests go: by a pair, whole to one worker, or where they cost least",
        choices=tuple(ROUTES),
    )
    prefix_fetch: bool = flag(False, "prefill workers fetch prefixes from other workers, decode workers among them")
    policy: str | None = flag(
        None, "how the router chooses prefill workers; default: as the router's", choices=POLICIES
    )


@dataclass(frozen=True, kw_only=True)
class PlannedWorkerFlags(FlagSet):
    topic = "workers"

    page_size: int = flag(64, "tokens per KV page (larger pages plan faster)", least=1, most=MAX_PAGE_SIZE)
    chunked_prefill_size: int = flag(8192, "most prompt tokens per step", least=1, special={-1: "no chunking"})
    mixed_chunk_size: int = flag(
        1024, "most prompt tokens per step of -mixed layouts, which run decodes in the same steps", least=1
    )
    max_running_requests: int = flag(256, "most requests in the running batch", least=1)
    mem_fraction_static: float = flag(0.9, "share of a GPU's memory for weights and KV", above=0, below=1)
    max_total_tokens: int | None = flag(
        None, "KV cache capacity of a worker, in tokens; default: by --mem-fraction-static", least=1
    )
    schedule_policy: str = flag("fcfs", "order of the waiting queue", choices=SCHEDULE_POLICIES)
    schedule_conservativeness: float = flag(
        1.0,
        "factor on the memory that running requests are expected to need; above 1: fewer run, fewer are retracted",
        least=0,
    )
    disable_overlap_schedule: bool = flag(False, "collect each step before the next one is launched")
    disable_radix_cache: bool = flag(False, "do not reuse the KV of equal prefixes")
    speculative_algorithm: str | None = flag(
        None, "plan with speculation, as workers with this flag", choices=SPECULATIVE_ALGORITHMS
    )
    speculative_draft_model_path: str | None = flag(
        None, "directory with the drafter's config.json (nothing else is read), or that file itself"
    )
    speculative_num_steps: int | None = flag(
        None, "most tokens that a model drafts; default: as workers", least=1, most=MAX_DRAFT_TOKENS - 1
    )
    speculative_num_draft_tokens: int | None = flag(
        None,
        "most tokens of a request that a decode step computes; default: as workers",
        least=2,
        most=MAX_DRAFT_TOKENS,
    )
    speculative_accept_rate: float | None = flag(
        None,
        "chance that the model samples a drafted token behind right ones; default: the profile's, or 0.7",
        above=0,
        below=1,
    )
    speculative_match_rate: float | None = flag(
        None, "with NGRAM: share of steps in which something is drafted; default: the profile's, or 1", above=0, most=1
    )


# Dataclass fields come from the last base first, so --help starts with HardwareFlags.
@dataclass(frozen=True, kw_only=True)
class PlanConfig(PlannedWorkerFlags, LayoutFlags, LimitFlags, LoadFlags, HardwareFlags):
    topic = "run"

    jobs: int = flag(2, "runs at a time, each in a process of its own", least=1)
    output: str | None = flag(None, "file to write with every run's figures, as JSON")
    plot: str | None = flag(None, "picture to write of goodput against rate (.png or .svg; needs matplotlib)")
    disable_progress: bool = flag(False, "show no progress bar")
    log_file: str | None = flag(None, "file for the log of the simulated workers; default: they write none")
    lowest_logged: str = flag(
        "info",
        "with --log-file: lowest level of the log",
        choices=("debug", "info", "warning", "error"),
        option="--log-level",
    )


def check_plan(config: PlanConfig) -> None:
    """Raises ConfigError."""
    if not config.model_path:
        raise ConfigError("--model-path: say which model; a directory with its config.json is enough")
    if config.fit and config.gpu_profile is not None:
        raise ConfigError("--fit: step times come from --gpu-profile already; give one of them")
    if not (config.gpu or config.fit or config.gpu_profile):
        raise ConfigError(f"--gpu: say what the workers run on ({', '.join(GPUS)}), or give --gpu-profile or --fit")
    if config.request_rate is not None:
        for option, is_given in (("--rates", bool(config.rates)), ("--total-rate", config.total_rate is not None)):
            if is_given:
                raise ConfigError(
                    f"{option}: --request-rate is the rate of the whole cluster already; give one of them"
                )
    if config.save_profile and not config.fit:
        raise ConfigError("--save-profile: needs --fit; there is nothing measured to save")
    if config.fit_pair and not config.fit:
        raise ConfigError("--fit-pair: needs --fit; a hand-over is measured against a unified worker's step times")
    if config.speculative_match_rate is not None and config.speculative_algorithm != NGRAM:
        raise ConfigError(
            "--speculative-match-rate: needs --speculative-algorithm NGRAM; a model drafts whenever it is asked"
        )
    if config.speculative_accept_rate is not None and config.speculative_algorithm is None:
        raise ConfigError("--speculative-accept-rate: needs --speculative-algorithm; nothing is drafted without it")
    if config.worker_cores is not None:
        _check_worker_cores(config.worker_cores, config.host_cores, config.step_cores)
    for name, time_s in (
        ("--host-request-time", config.host_request_time_s),
        ("--host-token-time", config.host_token_time_s),
    ):
        if time_s and config.host_cores is None:
            raise ConfigError(f"{name}: needs --host-cores; nothing is shared without it")


def _check_worker_cores(worker: int, host: float | None, step: int) -> None:
    if host is None or worker > host:
        raise ConfigError(f"--worker-cores {worker}: needs --host-cores of at least as many")
    if step > worker:
        raise ConfigError(f"--step-cores {step}: more than --worker-cores {worker}, the cores of a worker")
