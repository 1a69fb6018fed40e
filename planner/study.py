"""From flags to runs: workers, requests, results.

Only `study_of` reads files. Equal flags give equal studies.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from deploy.bench.stats import RequestRecord
from engine.config import MAX_PREFILL_TOKENS, EngineConfig
from engine.flags.resolve import resolve
from engine.flags.speculation import with_drafter
from engine.model_files.drafter_config import DRAFT_PATH
from engine.model_files.hub import CONFIG, RECALL_WIDE, SMOLLM2, download_config, is_model_id, smollm2_file
from engine.model_files.model_config import WIDE_MODEL_PATH, ModelConfig, load_model_config
from engine.parallel.layout import check_layout
from planner.cluster import ClusterCosts, ClusterLayout, PlannedCluster, candidates, parse_layout
from planner.config import HardwareFlags, PlanConfig
from planner.executor import Speculation, speculation_of
from planner.goodput import Point, SloTargets, point_of
from planner.hardware import Hardware, hardware_of, profile_of
from planner.memory import kv_pages, page_bytes
from planner.step_time import StepLoad
from planner.worker import WorkerSpec
from planner.workload import PlannedRequest, workload_of
from router.attempts.request import Slo
from router.config import ROUTES, RouterConfig
from service.flags import ConfigError

NUM_WORKERS, MAX_WORKERS = 4, 8  # of the default layouts; with --request-rate
NUM_REQUESTS, MAX_REQUESTS = 300, 1000
LONG = 5  # times the limit of TTFT that a run lasts; a shorter one measures queues
DEFAULT_BATCH = 32
MAX_QUEUED_REQUESTS = 100_000
SHARED_FLAGS = (  # with `tandem serve`
    *("page_size", "chunked_prefill_size", "max_running_requests", "mem_fraction_static", "max_total_tokens"),
    *("schedule_policy", "schedule_conservativeness", "disable_overlap_schedule", "disable_radix_cache"),
    *("speculative_algorithm", "speculative_draft_model_path"),
    *("speculative_num_steps", "speculative_num_draft_tokens"),
)
DEFAULT_LOAD = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """`page_bytes`: of the whole model. `history`: warms caches. `num_pages`, `speculation`: by
    GPUs per worker.
    """

    config: PlanConfig
    model: str
    engine: EngineConfig
    page_bytes: int
    speculation: dict[int, Speculation | None]
    hardware: Hardware
    slo: SloTargets
    costs: ClusterCosts
    requests: Sequence[PlannedRequest]
    history: Sequence[PlannedRequest]
    num_pages: dict[int, int]
    layouts: Sequence[ClusterLayout]

    @property
    def max_verified_per_s(self) -> float:
        """The highest rate at which a run is long enough."""
        return len(self.requests) / (LONG * self.slo.ttft_s)

    def kv_tokens(self, layout: ClusterLayout) -> int:
        return self.num_pages[layout.tp] * self.engine.page_size


def study_of(config: PlanConfig) -> Study:
    """Raises ConfigError."""
    model = _model(config)
    profile = profile_of(config)
    layouts = _layouts(
        config.layouts, sizes=_sizes(config), tps=config.tp_size or ((profile.tp_size,) if profile else (1,))
    )
    tps = sorted({layout.tp for layout in layouts})
    for tp in tps:
        check_layout(model, tp_size=tp, pp_size=1)
    engine = resolve(_engine(config), model, cuda=True)
    history, requests = workload_of(config, count=_num_requests(config))
    longest = max(request.input_len + request.output_len for request in requests)
    model = _with_drafter(engine, model, tps=tps, longest=longest)
    hardware = hardware_of(config, model, tps=tps, profile=profile)
    assert engine.context_length is not None, "resolved"
    if longest > engine.context_length:
        raise ConfigError(
            f"--model-path: its context of {engine.context_length} tokens is shorter than a request of {longest}"
        )
    on_cpu = config.host_cores is not None
    return Study(
        config=config,
        model=model.architecture,
        engine=engine,
        page_bytes=page_bytes(model, page_size=engine.page_size),
        speculation={
            tp: speculation_of(
                engine,
                accept_rate=hardware.accept_rate,
                match_rate=hardware.match_rate,
                time=hardware.drafter_times.get(tp),
            )
            for tp in tps
        },
        hardware=hardware,
        slo=SloTargets(
            ttft_s=config.slo_ttft_s,
            tpot_s=config.slo_tpot_s,
            itl_s=config.slo_itl_s,
            share=config.slo_percent / 100,
        ),
        costs=_costs(config, hardware),
        requests=requests,
        history=history,
        num_pages={
            tp: kv_pages(
                engine,
                model,
                tp=tp,
                memory_bytes=hardware.memory_bytes,
                gpu=hardware.gpu_flag,
                longest=longest,
                on_cpu=on_cpu,
            )
            for tp in tps
        },
        layouts=layouts,
    )


def with_local_models(config: PlanConfig) -> PlanConfig:
    """Replace model and drafter by local files; the hub gives a config.json. Raises ConfigError."""
    drafter = config.speculative_draft_model_path
    if drafter is not None:
        drafter = _local(drafter, option=DRAFT_PATH)
        if not Path(drafter).exists():
            raise ConfigError(
                f"{DRAFT_PATH} {drafter}: no such directory; one with the drafter's config.json is enough"
            )
    model = _local(config.model_path, option="--model-path")
    return replace(config, model_path=model, speculative_draft_model_path=drafter)


def _model(config: HardwareFlags) -> ModelConfig:
    """Raises ConfigError."""
    model = load_model_config(config.model_path)
    if model.experts is not None:
        raise ConfigError(
            f"--model-path {config.model_path}: the cost model knows dense models; a mixture of experts reads other weights in "
            "each step"
        )
    if model.recurrent is not None:
        raise ConfigError(
            f"--model-path {config.model_path}: the cost model knows memory that grows with a request, not recurrent states"
        )
    return model


def _costs(config: PlanConfig, hardware: Hardware) -> ClusterCosts:
    return ClusterCosts(
        control_s=config.control_latency_s,
        latency_s=hardware.latency_s,
        outside_s=hardware.outside_s,
        cores=config.host_cores,
        worker_cores=config.worker_cores,
        host_request_s=config.host_request_time_s,
        host_token_s=config.host_token_time_s,
        policy=RouterConfig(policy=config.policy, route=config.route).default_policy,
        route=config.route,
        wanted=Slo(config.slo_ttft_s, config.slo_tpot_s),
    )


def _num_requests(config: PlanConfig) -> int:
    """So many that twice the wanted rate is no single burst."""
    if config.num_requests is not None:
        return config.num_requests
    wanted = math.ceil(2 * LONG * config.slo_ttft_s * (config.request_rate or 0.0))
    return min(max(NUM_REQUESTS, wanted), MAX_REQUESTS)


def _sizes(config: PlanConfig) -> Sequence[int]:
    if config.request_rate is None:
        return (config.num_workers or NUM_WORKERS,)
    return range(1, (config.num_workers or MAX_WORKERS) + 1)


def _layouts(texts: Sequence[str], *, sizes: Sequence[int], tps: Sequence[int]) -> list[ClusterLayout]:
    if not texts:
        return list(dict.fromkeys(layout for size in sizes for layout in candidates(size, tps=tps)))
    named = [parse_layout(text) for text in texts]
    return list(dict.fromkeys(replace(one, tp=tp) for one in named for tp in (tps if one.tp == 1 else (one.tp,))))


def run_study(study: Study, cluster: PlannedCluster, rate: float) -> list[RequestRecord]:
    """Run at `rate` per second, until no request can be good."""
    cluster.warm(study.history)
    latest_s = list[float]()
    for one in study.requests:
        sent_s = one.at / rate if one.after is None else max(one.at / rate, latest_s[one.after])
        latest_s.append(study.slo.latest_s(sent_s=sent_s, output_len=one.output_len))
    return cluster.run(study.requests, rate=rate, until_s=max(latest_s))


def try_rate(study: Study, layout: ClusterLayout, rate: float) -> Point:
    """Run at `rate` per second and GPU."""
    cluster = planned_cluster(study, layout)
    records = run_study(study, cluster, rate * layout.num_gpus)
    busy = defaultdict[str, list[float]](list)
    for worker in cluster.workers:
        busy[worker.spec.role].append(worker.executor.busy_s / cluster.now_s)
    shares = {role: min(1.0, mean(s)) for role, s in busy.items()}
    return point_of(records, rate=rate, slo=study.slo, busy=shares, step_tokens=cluster.step_tokens)


def guess_rate(study: Study, layout: ClusterLayout) -> float:
    """A first rate per second and GPU, below capacity."""
    size = len(study.requests)
    tokens = sum(request.input_len for request in study.requests) / size
    outputs = sum(request.output_len for request in study.requests) / size
    time = study.hardware.step_times[layout.tp]
    prefill = StepLoad(prefill_tokens=int(tokens), prefill_pairs=tokens**2 / 2, prefill_context=int(tokens), samples=1)
    context = int(DEFAULT_BATCH * (tokens + outputs / 2))
    decode = StepLoad(decodes=DEFAULT_BATCH, decode_context=context, samples=DEFAULT_BATCH)
    prefill_s, decode_s = time.seconds(prefill), outputs * time.seconds(decode) / DEFAULT_BATCH
    capacity = layout.unified / (prefill_s + decode_s) + min(layout.prefill / prefill_s, layout.decode / decode_s)
    return DEFAULT_LOAD * capacity / layout.num_gpus


def planned_cluster(study: Study, layout: ClusterLayout) -> PlannedCluster:
    size = study.config.mixed_chunk_size
    plain = replace(study.engine, enable_mixed_chunk=False)
    mixed = replace(study.engine, enable_mixed_chunk=True, chunked_prefill_size=size)
    mixing = {"decode", *(ROUTES[study.costs.route] if layout.decode else ()), *(("unified",) if layout.mixed else ())}
    engines = {role: mixed if role in mixing else plain for role in layout.roles}
    workers = {
        role: WorkerSpec(
            role=role,
            engine=engine,
            num_pages=study.num_pages[layout.tp],
            page_bytes=study.page_bytes,
            link_bytes_per_s=layout.tp * study.hardware.link_bytes_per_s,
            step_time=study.hardware.step_times[layout.tp],
            threads=study.config.step_cores,
            beside=study.hardware.beside,
            speculation=study.speculation[layout.tp],
            prefix_fetch=study.config.prefix_fetch and role != "unified",
        )
        for role, engine in engines.items()
    }
    return PlannedCluster(layout, workers, study.costs)


def _engine(config: PlanConfig) -> EngineConfig:
    if config.mixed_chunk_size < config.page_size:
        raise ConfigError(
            f"--mixed-chunk-size: must be at least --page-size ({config.page_size}), got {config.mixed_chunk_size}"
        )
    shared = {name: getattr(config, name) for name in SHARED_FLAGS}
    return EngineConfig(
        device="cuda", max_prefill_tokens=MAX_PREFILL_TOKENS, max_queued_requests=MAX_QUEUED_REQUESTS, **shared
    )


def _local(given: str, *, option: str) -> str:
    """A directory or a file. Raises ConfigError."""
    path = Path(given)
    if path.exists():
        return str(path.parent if path.name == CONFIG else path)
    if given == SMOLLM2:
        return str(smollm2_file())
    if given == RECALL_WIDE:
        return WIDE_MODEL_PATH
    if not is_model_id(given):
        return given
    try:
        return download_config(given, option=option)
    except ImportError:
        raise ConfigError(
            f"{option} {given}: models of the hub need huggingface_hub; pip install 'tandem-serve[plan]', or give a "
            "directory with the model's config.json"
        ) from None


def _with_drafter(engine: EngineConfig, model: ModelConfig, *, tps: Sequence[int], longest: int) -> ModelConfig:
    found = model
    for tp in tps:  # each checks a rank's part
        found = with_drafter(replace(engine, tp_size=tp, kv_units=None, context_length=longest), model)
    if found.drafter is not None and found.drafter.layers.experts is not None:
        raise ConfigError(
            f"{DRAFT_PATH} {found.drafter.path}: the cost model knows dense models, not a mixture of experts"
        )
    return found
