"""Fills in flag defaults; an error names the flag. Pure."""

from dataclasses import replace

from engine.config import (
    MAX_PREFILL_TOKENS,
    MAX_RUNNING_OF,
    MEM_FRACTION_OF,
    EngineConfig,
    MemoryFlags,
    ModelFlags,
    SchedulingFlags,
)
from engine.core.dp_agreement import Agreement, Board
from engine.core.dp_step import DECIDES, PrefillDelayer
from engine.core.estimates import RatioRule, StepBudget
from engine.core.policy import NO_PRIORITIES, TAIL_SHARE, Limits, Priorities
from engine.flags.hicache import resolve_hicache
from engine.flags.images import check_encoder, vlm_cache_size_mb
from engine.flags.kv_dtype import kv_dtype
from engine.flags.model_source import check_load_format
from engine.flags.pdmux import check_pdmux
from engine.flags.rank_rules import check_sizes
from engine.flags.speculation import check_speculation, drafts_by_model
from engine.flags.tokenizer import grammar_backend
from engine.lora.peft_config import check_lora, lora_enabled
from engine.model_files.model_config import ModelConfig
from engine.parallel.layout import model_units
from service.flags import ConfigError

MAX_STEP_TIME_S = {"cpu": 1.0, "cuda": 0.5}  # below the router's timeout (1.5 s)
STEP_WITH_ANSWERS_S = {"cpu": 0.25, "cuda": 0.1}  # several times a usual decode step, or prompts get no share of it
FIRST_FLOPS = {"cpu": 50e9, "cuda": 50e12}  # per second of a thread or GPU: a cautious estimate for the first step
PROFILE_S = 1.0  # limit for a start
LORA_DRAIN_WAIT_S = 10.0  # SGLang's default: typical answers with the evicted adapter finish
GPU_LORA_RANK = 64  # grouped kernels launch for this rank and skip what an adapter lacks
BACKUP_SHARE = 0.5
CHUNK_OF = {"cpu": 1024, "cuda": 8192}  # larger is no faster on a CPU, and delays later requests


def resolve(config: EngineConfig, model: ModelConfig, *, cuda: bool) -> EngineConfig:
    """Decide every "auto" and None, except the KV capacity (`num_pages`)."""
    device = config.device if config.device != "auto" else ("cuda" if cuda else "cpu")
    if device == "cuda" and not cuda:
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if config.max_total_tokens is not None and config.max_total_tokens < config.page_size:
        raise ConfigError(
            f"--max-total-tokens: must hold at least one page (--page-size {config.page_size}), "
            f"got {config.max_total_tokens}"
        )
    check_load_format(config)
    if config.radix_eviction_policy == "priority" and not config.enable_priority_scheduling:
        raise ConfigError("--radix-eviction-policy priority: needs --enable-priority-scheduling")
    config = resolve_hicache(config)
    _check_cuda_graph(config, device)
    dtype = _dtype(config.dtype, model.dtype)
    if config.quantization and dtype != "bfloat16":
        raise ConfigError(
            f"--quantization {config.quantization}: integers are multiplied with --dtype bfloat16, not with {dtype}; leave it out"
        )
    if config.quantization and model.stored is not None and model.stored.layout != "fp8":
        raise ConfigError(
            f"--quantization {config.quantization}: the checkpoint's weights are integers already ({model.stored}); leave it out"
        )
    check_lora(config.lora_paths, max_loaded=config.max_loaded_loras)
    check_sizes(config, model)
    check_speculation(config, model)
    check_encoder(config, model)
    check_pdmux(config, model)
    context = _context_length(config.context_length, model.max_position_embeddings)
    return replace(
        config,
        enable_lora=lora_enabled(config.enable_lora, config.lora_paths),
        max_lora_rank=config.max_lora_rank or (GPU_LORA_RANK if device == "cuda" else None),
        device=device,
        kv_units=model_units(model, tp_size=config.attention_tp_size, kv_units=config.kv_units),
        mem_fraction_static=config.mem_fraction_static or MEM_FRACTION_OF[device],
        max_running_requests=config.max_running_requests or MAX_RUNNING_OF[device],
        grammar_backend=grammar_backend(config),
        dtype=dtype,
        kv_cache_dtype=kv_dtype(config, model, device=device, dtype=dtype),
        stream=_stream(config, device),
        context_length=context,
        vlm_cache_size_mb=vlm_cache_size_mb(config, model, dtype=dtype, context=context),
        chunked_prefill_size=_chunk(config.chunked_prefill_size, config.page_size, device),
        max_prefill_tokens=config.max_prefill_tokens or MAX_PREFILL_TOKENS,
        max_step_time_s=_max_step_time_s(config.max_step_time_s, device, chunked=config.chunked_prefill_size != -1),
        num_threads=config.num_threads or 1,  # engine/flags/local_defaults.py has counted cores in a worker
        enable_mixed_chunk=_mixed_chunk(config, device),
    )


def of_role(config: EngineConfig, mode: str, *, device: str) -> EngineConfig:
    """Defaults by mode: decodes ride with prompts, on decode workers in short steps."""
    if mode not in ("prefill", "decode") or config.enable_pdmux:
        return config
    step_s = STEP_WITH_ANSWERS_S[device] if mode == "decode" and config.chunked_prefill_size != -1 else None
    return replace(
        config,
        enable_mixed_chunk=True if config.enable_mixed_chunk is None else config.enable_mixed_chunk,
        max_step_time_s=step_s if config.max_step_time_s is None else config.max_step_time_s,
    )


def _mixed_chunk(config: SchedulingFlags, device: str) -> bool:
    if config.enable_mixed_chunk is None:
        return device == "cpu" and not config.enable_pdmux
    return config.enable_mixed_chunk


def depth(config: EngineConfig) -> int:
    """Steps in flight; an inline stream overlaps none."""
    overlap = not (config.disable_overlap_schedule or config.stream == "inline")
    return limits(config).micro_batches + overlap


def drafts_overlap(config: EngineConfig) -> bool:
    """True if the executor drafts, and steps with drafts overlap."""
    return drafts_by_model(config) and depth(config) > 1


def limits(config: EngineConfig) -> Limits:
    assert config.chunked_prefill_size is not None and config.max_running_requests is not None
    assert config.max_prefill_tokens is not None, "resolved"
    return Limits(
        page_size=config.page_size,
        max_running_requests=config.max_running_requests,
        max_queued_requests=config.max_queued_requests,
        max_prefill_tokens=config.max_prefill_tokens,
        chunked_prefill_size=config.chunked_prefill_size if config.chunked_prefill_size > 0 else None,
        prefill_max_requests=config.prefill_max_requests,
        mixed_chunk=bool(config.enable_mixed_chunk),
        multiplexed=config.enable_pdmux,
        max_loras_per_batch=config.max_loras_per_batch if config.enable_lora else 0,
        lora_drain_wait_s=LORA_DRAIN_WAIT_S,
        policy=config.schedule_policy,
        test_retract=config.test_retract,
        priorities=priorities(config),
        pp_size=config.pp_size,
        pp_async_batch_depth=config.pp_async_batch_depth,
    )


def agreement_of(config: EngineConfig, board: Board, dp_rank: int) -> Agreement:
    delays = config.enable_prefill_delayer and dp_rank == DECIDES
    return Agreement(board, rank=dp_rank, delayer=PrefillDelayer() if delays else None)


def ratio_rule(config: SchedulingFlags) -> RatioRule:
    return RatioRule(conservativeness=config.schedule_conservativeness)


def step_budget(config: EngineConfig, model: ModelConfig, *, part_tokens: int) -> StepBudget | None:
    """`part_tokens`: as in Limits."""
    assert config.max_step_time_s is not None and config.num_threads is not None
    if config.max_step_time_s == 0:
        return None
    token_flops = flops_of_token(model)
    pair_flops = model.num_layers * model.pair_flops()
    threads = config.num_ranks * (config.num_threads if config.device == "cpu" else 1)
    return StepBudget(
        max_step_s=config.max_step_time_s,
        page_size=part_tokens,
        attention_tokens=token_flops / pair_flops,
        first_rate=token_flops / (FIRST_FLOPS[config.device] * threads),
    )


def flops_of_token(model: ModelConfig) -> float:
    mlp_weights = model.mlp_matrices * model.hidden_size * model.mlp_width(active=True)
    return 2 * model.num_layers * (model.attention_weights() + mlp_weights)


def profiled_tokens(config: EngineConfig, model: ModelConfig) -> int:
    """Prompt tokens to measure on a CPU: the maximum, or what PROFILE_S can compute."""
    assert config.num_threads is not None, "resolved"
    tokens = int(PROFILE_S * FIRST_FLOPS["cpu"] * config.num_threads / flops_of_token(model))
    return min(largest_prompt_step(config), max(config.page_size, tokens))


def priorities(config: SchedulingFlags) -> Priorities:
    if not config.enable_priority_scheduling:
        return NO_PRIORITIES
    return Priorities(
        low_first=config.schedule_low_priority_values_first,
        aging_s=config.priority_aging_s,
        preempt_threshold=config.priority_scheduling_preemption_threshold,
    )


def num_pages(config: EngineConfig, *, page_bytes: int, kv_bytes: int) -> int:
    """KV pages: --max-total-tokens, or what `kv_bytes` hold and requests can use."""
    assert config.context_length is not None and config.max_running_requests is not None, "resolved"
    if config.max_total_tokens is not None:
        return config.max_total_tokens // config.page_size
    usable = config.max_running_requests * -(-config.context_length // config.page_size)
    pages = min(kv_bytes // page_bytes, usable)
    if pages < 1:
        raise ConfigError(
            f"--mem-fraction-static {config.mem_fraction_static}: {kv_bytes} bytes hold no KV page of {page_bytes}; "
            "raise it, or set --max-total-tokens"
        )
    return pages


def state_slots(config: EngineConfig) -> int:
    """Slots of running requests, and as many cached or in transfer."""
    assert config.max_running_requests is not None, "resolved"
    return config.max_mamba_cache_size or 2 * config.max_running_requests


def largest_prompt_step(config: EngineConfig) -> int:
    """Max prompt tokens of a step. Without chunks the first prompt runs whole (as in SGLang)."""
    assert config.chunked_prefill_size is not None and config.max_prefill_tokens is not None, "resolved"
    if config.chunked_prefill_size == -1:
        return max(config.max_prefill_tokens, longest_prompt(config))
    return config.chunked_prefill_size + config.chunked_prefill_size // TAIL_SHARE


def longest_prompt(config: MemoryFlags) -> int:
    assert config.context_length is not None, "resolved"
    return min(config.context_length, config.max_total_tokens or config.context_length)


def backup_pages(config: ModelFlags, *, num_pages: int, page_bytes: int, free_bytes: int) -> int:
    """Host pages for retracted requests: as many as the pool.

    On a GPU they are pinned, at most BACKUP_SHARE of free host memory.
    """
    return num_pages if config.device == "cpu" else min(num_pages, int(free_bytes * BACKUP_SHARE) // page_bytes)


def _check_cuda_graph(config: ModelFlags, device: str) -> None:
    sizes, most = config.cuda_graph_bs, config.cuda_graph_max_bs
    flags = (
        ("--cuda-graph-bs", bool(sizes)),
        ("--cuda-graph-max-bs", most is not None),
    )
    for name, given in flags:
        if given and device != "cuda":
            raise ConfigError(f"{name}: the model runs on {device}, where there are no CUDA graphs; leave the flag out")
        if given and config.disable_cuda_graph:
            raise ConfigError(f"{name}: --disable-cuda-graph is given as well; leave one of them out")
    if sizes and most is not None:
        raise ConfigError("--cuda-graph-bs: names every size, so --cuda-graph-max-bs means nothing beside it")


def _dtype(given: str, stored: str) -> str:
    if given != "auto":
        return given
    return "float32" if stored == "float32" else "bfloat16"


def _stream(config: EngineConfig, device: str) -> str:
    """CPU default: threaded if the loop plans during a step, else inline."""
    given = config.stream
    if given == "auto":
        return "cuda" if device == "cuda" else "threaded" if config.watches_steps or config.enable_pdmux else "inline"
    if (given == "cuda") != (device == "cuda"):
        raise ConfigError(f"--stream {given}: the model runs on {device}; leave the flag out")
    return given


def _context_length(given: int | None, model_max: int) -> int:
    if given is None:
        return model_max
    if given > model_max:
        raise ConfigError(f"--context-length: must be at most the model's {model_max}, got {given}")
    return given


def _max_step_time_s(given: float | None, device: str, *, chunked: bool) -> float:
    if given is None:
        return MAX_STEP_TIME_S[device] if chunked else 0.0
    if given > 0 and not chunked:
        raise ConfigError("--max-step-time: needs chunks; leave --chunked-prefill-size -1 out")
    return given


def _chunk(given: int | None, page_size: int, device: str) -> int:
    """Round down, so that chunks hand over whole pages."""
    if given is None:
        given = max(CHUNK_OF[device], page_size)
    if given == -1:
        return -1
    if given < page_size:
        raise ConfigError(f"--chunked-prefill-size: must be -1 or at least --page-size ({page_size}), got {given}")
    return given // page_size * page_size
