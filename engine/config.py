"""The engine's flags, named as in SGLang; deploy/flags.py derives `--flag`s.

resolve() fills in None; an impossible value is an error that names the flag.
"""

import math
from dataclasses import dataclass

from engine.core.mem_cache.host_cache import PREFETCH_POLICIES, STORAGE_BACKENDS, WRITE_POLICIES
from engine.core.mem_cache.radix_cache import EVICTION_POLICIES
from engine.core.policy import POLICIES
from engine.text.reasoning import REASONING_FORMATS
from engine.text.tool_calls import CALL_FORMATS
from service.flags import FlagSet, flag, setting
from service.images.hosts import ImageFlags
from service.telemetry.context import FORMATS as LOG_FORMATS

GRAMMAR_BACKENDS = ("llguidance", "none")
TOOL_CALL_PARSERS = (*CALL_FORMATS, "gpt-oss", "openai")
LOAD_BALANCE_METHODS = (
    *("auto", "round_robin", "decode_round_robin", "follow_bootstrap_room"),
    *("shortest_queue", "total_requests", "minimum_tokens", "total_tokens"),
)
SPECULATIVE_ALGORITHMS = ("NGRAM", "STANDALONE", "NEXTN", "EAGLE", "EAGLE3")
MAX_DRAFT_TOKENS = 64
MAX_TOPK = 16  # rows of each request in a draft step
MAX_PAGE_SIZE = 1024
MAX_PORT = 65535
MAX_NODES = 64
FP8 = "fp8_e4m3"  # of --kv-cache-dtype
DUMMY = "dummy"  # of --load-format
MEM_FRACTION_OF = {"cpu": 0.2, "cuda": 0.9}  # of memory without weights and steps; of the GPU's memory
MAX_PREFILL_TOKENS = 16384  # SGLang's default
# One frontend ends at some 47,000 tokens a second, which a small model on a GPU reaches with as many streams.
MANY_RUNNING, FRONTENDS_OF_MANY = 128, 2
MAX_RUNNING_OF = {"cpu": 64, "cuda": 256}  # below some 200 rows a GPU is memory-bound


@dataclass(frozen=True, kw_only=True)
class ModelFlags(FlagSet):
    topic = "model"

    model_path: str = flag(
        "",
        "a checkpoint directory (config.json, *.safetensors, tokenizer.json), a .gguf file, a model of the Hugging Face "
        "hub (ORGANIZATION/NAME), smollm2, or recall-wide; default: the model that ships with Tandem",
    )
    revision: str | None = flag(
        None, "branch, tag or commit of a model of the Hugging Face hub; default: its main branch"
    )
    skip_tokenizer_init: bool = flag(
        False,
        "load no tokenizer: requests bring token ids (input_ids) and answers have token ids (output_ids); what needs text is refused",
    )
    served_model_name: str | None = flag(
        None,
        "model name in /v1/models and in answers; default: the name of the directory, the file or the model of the hub",
    )
    load_format: str = flag(
        "auto",
        "where weights come from: safetensors or a GGUF file, as --model-path has them; dummy: random ones, of a directory or a model "
        "of the hub whose config.json alone is read; for tests of load and flags",
        choices=("auto", "safetensors", DUMMY),
    )
    dtype: str = flag("auto", "data type of weights", choices=("auto", "bfloat16", "float32"))
    kv_cache_dtype: str = flag(
        "auto",
        "data type of the KV cache, the same for prefill and decode workers; auto: --dtype; fp8_e4m3: 8 bits, with a scale "
        "for each token and KV head: half the bytes in memory and on their way",
        choices=("auto", "bf16", "bfloat16", "float32", FP8),
    )
    quantization: str | None = flag(
        None,
        "round weights to integers while they are loaded, int8wo with a scale for each output, int4wo-N with a scale and an "
        "offset for N inputs (the output layer: int8): decode reads a half, or a third to a quarter, of the bytes",
        choices=("int8wo", "int4wo-32", "int4wo-64", "int4wo-128"),
    )
    device: str = flag("auto", "device that runs the model", choices=("auto", "cpu", "cuda"))
    attention_backend: str = flag(
        "auto",
        "attention kernels; auto: cpu or triton; flashinfer: triton, and long prompts by FlashInfer (extra flashinfer)",
        choices=("auto", "cpu", "torch", "triton", "flashinfer"),
    )
    stream: str = flag(
        "auto",
        "how the executor runs steps; inline and threaded are for cpu",
        choices=("auto", "inline", "threaded", "cuda"),
    )
    disable_cuda_graph: bool = flag(
        False, "launch decode steps kernel by kernel instead of as CUDA graphs (on cpu: as tapes)"
    )
    cuda_graph_max_bs: int | None = flag(
        None, "largest batch that decodes as a CUDA graph; default: --max-running-requests, at most 256", least=1
    )
    cuda_graph_bs: tuple[int, ...] = flag(
        (), "batch sizes to capture as CUDA graphs; default: chosen by --cuda-graph-max-bs", least=1
    )
    weight_version: str = flag("default", "name of the weights in meta_info, until an update of the weights changes it")
    random_seed: int | None = flag(
        None, "seed for requests that bring none; default: drawn at start and shown in /server_info"
    )


@dataclass(frozen=True, kw_only=True)
class ParallelFlags(FlagSet):
    topic = "parallel"

    tp_size: int = flag(
        1, "ranks that share the model: each holds a part of every layer (tensor parallelism)", least=1, most=64
    )
    pp_size: int = flag(
        1, "stages that share the model: each holds some of its layers (pipeline parallelism)", least=1, most=64
    )
    pp_async_batch_depth: int = flag(
        0,
        "with --pp-size: steps in flight beyond one for each stage, so that a stage has the next one at hand",
        least=0,
        most=16,
    )
    pp_layer_partition: tuple[int, ...] = flag(
        (), "with --pp-size: layers of each stage; default: balanced by the bytes of their weights", least=1
    )
    ep_size: int = flag(
        1,
        "ranks that share a mixture's experts, each with whole ones (expert parallel): --tp-size; 1: each has a part of every expert",
        least=1,
        most=64,
    )
    enable_eplb: bool = flag(
        False, "with --ep-size: experts move between ranks while steps run, by their loads, or get copies"
    )
    eplb_rebalance_num_iterations: int = flag(1000, "with --enable-eplb: steps from one time to the next", least=1)
    ep_num_redundant_experts: int = flag(
        0, "with --ep-size: places for copies of experts in each layer, over all ranks", least=0, most=4096
    )
    init_expert_location: str = flag(
        "trivial",
        "with --ep-size: where experts are at start: in order, or a JSON file with physical_to_logical_map (the experts of all "
        "places, by layer) or logical_count (loads of all experts, by layer)",
    )
    reduce_units: int = flag(
        0,
        "parts in which layers sum their products, in one order at every --tp-size: answers are then equal to the bit for "
        "every --tp-size that divides it",
        least=0,
        most=64,
        special={0: "one for each rank"},
    )
    mm_enable_dp_encoder: bool = flag(
        False,
        "the --tp-size ranks divide the images of a step and exchange their features; without it each encodes all",
    )
    dist_timeout_s: float = flag(
        600.0,
        "longest time until every rank is there, and then until it has loaded its part of the model",
        unit="s",
        above=0,
    )
    nnodes: int = flag(
        1, "machines that hold the ranks of --tp-size and --pp-size, as many each (on cpu)", least=1, most=MAX_NODES
    )
    node_rank: int = flag(
        0,
        "number of this machine. Node 0 schedules and serves HTTP; the others get the same other flags and compute",
        least=0,
        most=MAX_NODES - 1,
    )
    dist_init_addr: str | None = flag(
        None, "with --nnodes: HOST:PORT of node 0 at which the machines meet; node 0 listens there"
    )
    dp_size: int = flag(
        1,
        "data-parallel ranks of this worker: schedulers, each with the whole model and a KV cache of its own; on a GPU each "
        "has its own, on a CPU they divide cores and --mem-fraction-static",
        least=1,
        most=64,
    )
    enable_dp_attention: bool = flag(
        False,
        "the --dp-size schedulers divide the --tp-size ranks for attention, and share all of them for the MLPs",
    )
    enable_prefill_delayer: bool = flag(
        False,
        "with --enable-dp-attention: prompts of one DP rank wait for prompts of the others, since each slows all",
    )
    num_threads: int | None = flag(
        None,
        "threads of a rank that compute on cpu; default: one per core (or OMP_NUM_THREADS) over --dp-size, at most one per "
        "64 MiB of weights",
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class MemoryFlags(FlagSet):
    topic = "memory"

    page_size: int = flag(16, "tokens per KV page", least=1, most=MAX_PAGE_SIZE)
    kv_units: int | None = flag(
        None,
        "parts of a KV page over all ranks, each with an equal share of the KV heads: what prefill and decode workers "
        "exchange, so give both the same number, a multiple of each one's ranks; default: the number of ranks",
        least=1,
    )
    context_length: int | None = flag(None, "longest prompt plus answer, in tokens; default: the model's", least=1)
    max_total_tokens: int | None = flag(
        None, "KV cache capacity, in tokens; default: from --mem-fraction-static", least=1
    )
    mem_fraction_static: float | None = flag(
        None,
        "share of memory for weights and KV cache together, states included: of the GPU's, which several workers on it divide; on "
        "cpu of what is free at start. The largest steps must fit beside it. Default: as much as they leave, on cuda at most "
        f"{MEM_FRACTION_OF['cuda']}; on cpu {MEM_FRACTION_OF['cpu']} of what weights and steps leave, at most 4 GiB, is for KV",
        above=0,
        below=1,
    )
    enable_memory_saver: bool = flag(
        False,
        "on cuda: allocate the KV cache so that /release_memory_occupation can give it back; on cpu it always can",
    )
    max_mamba_cache_size: int | None = flag(
        None,
        "states of a recurrent model: of running requests, and snapshots of prefixes; default: two for each running request, no "
        "more than their share of memory holds. Where tokens are drafted, one more for each running request "
        "is beside them",
        least=2,
    )
    vlm_cache_size_mb: int | None = flag(
        None,
        "memory for features of images, in units of 2^20 bytes: images that come again are not encoded again; "
        "default: 100, or what the largest image needs",
        unit="MB",
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class SchedulingFlags(FlagSet):
    topic = "scheduling"

    max_running_requests: int | None = flag(
        None,
        f"most requests in the running batch; default: {MAX_RUNNING_OF['cpu']} on cpu, {MAX_RUNNING_OF['cuda']} on cuda, or what memory holds",
        least=1,
    )
    max_queued_requests: int = flag(4096, "most requests that wait; further ones are answered 503", least=0)
    chunked_prefill_size: int | None = flag(
        None,
        "most prompt tokens per step; longer prompts are split into chunks, and the last chunk may be larger by a 16th; "
        "default: 1024 on cpu, 8192 on cuda, less where memory is short",
        least=1,
        special={-1: "no chunking"},
    )
    max_step_time_s: float | None = flag(
        None,
        "target duration of a step with prompts: the step holds as many prompt tokens as the measured speed allows, "
        "at least one page and at most --chunked-prefill-size; default: 1 on cpu, 0.5 on cuda; on decode workers 0.25 and 0.1",
        unit="s",
        least=0,
        below=math.inf,
        special={0: "no limit"},
    )
    max_prefill_tokens: int | None = flag(
        None,
        "most prompt tokens of a step if chunking is off; a longer prompt is a step of its own; default: "
        f"{MAX_PREFILL_TOKENS}, less where memory is short",
        least=1,
    )
    prefill_max_requests: int | None = flag(None, "most prompts per prefill step; default: no limit")
    enable_mixed_chunk: bool | None = flag(
        None, "run decodes in the same step as prefills; default: yes, but not on a unified worker's cuda"
    )
    enable_pdmux: bool = flag(
        False,
        "compute prompts and decodes at the same time, as steps of their own that share the device: on cpu its threads, on cuda its "
        "multiprocessors (PD multiplexing); in place of mixed chunks",
    )
    pdmux_itl_s: float | None = flag(
        None,
        "with --enable-pdmux: inter-token latency that clients want; decodes get the share of the device that keeps it, and prompts "
        "the rest; default: a half each",
        unit="s",
        above=0,
        below=math.inf,
    )
    schedule_policy: str = flag("fcfs", "order of the waiting queue", choices=POLICIES)
    schedule_conservativeness: float = flag(
        1.0,
        "factor on the memory that running requests are expected to need; above 1: fewer run, fewer are retracted",
        least=0,
    )
    disable_overlap_schedule: bool = flag(False, "collect each step before the next one is launched (depth 1)")
    enable_priority_scheduling: bool = flag(False, "schedule requests with a higher `priority` first")
    schedule_low_priority_values_first: bool = flag(
        False, "with --enable-priority-scheduling: schedule lower `priority` values first"
    )
    priority_scheduling_preemption_threshold: int = flag(
        10,
        "with --enable-priority-scheduling: a waiting request preempts a running one whose priority is lower by more "
        "than this",
    )
    priority_aging_s: float | None = flag(
        None,
        "with --enable-priority-scheduling: time in the queue that raises a request's priority by one; default: never",
        unit="s",
        above=0,
    )
    decode_log_interval: int = flag(40, "steps between two log lines about prefill, decode and memory", least=1)
    watchdog_timeout_s: float = flag(
        300.0,
        "longest turn of the scheduler; beyond it the worker prints its stacks and exits",
        unit="s",
        least=0,
        special={0: "no limit"},
    )


@dataclass(frozen=True, kw_only=True)
class CacheFlags(FlagSet):
    topic = "cache"

    disable_radix_cache: bool = flag(False, "do not reuse the KV of equal prefixes")
    disable_hybrid_swa_memory: bool = flag(False, "keep all KV of layers with a window: a pair must do it alike")
    radix_eviction_policy: str = flag(
        "lru", "which cached prefixes make room first (docs/tuning.md)", choices=EVICTION_POLICIES
    )
    enable_hierarchical_cache: bool = flag(False, "keep evicted prefixes in host memory, and load them from there")
    hicache_ratio: float = flag(
        2.0, "host memory for prefixes, as a multiple of the device's KV cache", above=0, below=math.inf
    )
    hicache_size: float = flag(
        0.0,
        "host memory for prefixes, in units of 10^9 bytes",
        unit="GB",
        least=0,
        below=math.inf,
        special={0: "by --hicache-ratio"},
    )
    hicache_write_policy: str = flag(
        "write_through",
        "when a prefix is copied to the host: when computed, when a second request reads it, or when evicted",
        choices=WRITE_POLICIES,
    )
    hicache_storage_backend: str | None = flag(
        None,
        "store prefixes behind the host memory, too: in files of this worker, or in a Mooncake Store, which workers share; "
        "default: file with --hicache-storage-dir, else none",
        choices=STORAGE_BACKENDS,
    )
    hicache_storage_backend_extra_config: str | None = flag(
        None, 'where the Mooncake Store is; JSON such as {"master_server_address": "127.0.0.1:50051"}'
    )
    hicache_storage_dir: str | None = flag(None, "directory for files: each worker takes a numbered one in it")
    hicache_storage_size_gb: float = flag(
        10.0,
        "most bytes of a worker's prefix files, in units of 10^9; the oldest files are deleted",
        unit="GB",
        above=0,
        below=math.inf,
    )
    hicache_storage_prefetch_policy: str = flag(
        "auto",
        "how long a request waits for its stored prefix: not at all, for all of it, or for a second; auto: best_effort for "
        "files, timeout for a store",
        choices=("auto", *PREFETCH_POLICIES),
    )
    kv_events_config: str | None = flag(
        None, 'publish the events of the prefix cache over ZMQ; JSON such as {"endpoint": "tcp://127.0.0.1:5557"}'
    )


@dataclass(frozen=True, kw_only=True)
class SpeculativeFlags(FlagSet):
    topic = "speculative"

    speculative_algorithm: str | None = flag(
        None,
        "verify several tokens of a request in a decode step; NGRAM: guess what followed the same words earlier in its prompt and "
        "answer; STANDALONE: a small model drafts them; NEXTN: the model's own MTP layer; EAGLE, EAGLE3: a layer trained for "
        "the model; default: none",
        choices=SPECULATIVE_ALGORITHMS,
    )
    speculative_draft_model_path: str | None = flag(
        None,
        "with STANDALONE, EAGLE or EAGLE3: checkpoint of the drafter, a directory or a model of the Hugging Face hub",
    )
    speculative_num_steps: int | None = flag(
        None,
        "most tokens that a model drafts for a request, one after the other; fewer where drafts are often wrong or cost too much; "
        "default: one less than --speculative-num-draft-tokens, or 4",
        least=1,
        most=MAX_DRAFT_TOKENS - 1,
    )
    speculative_eagle_topk: int | None = flag(
        None,
        "tokens that a model drafts for each place: above 1 drafts are a tree, of which a step verifies what is likely; default: 1",
        least=1,
        most=MAX_TOPK,
    )
    speculative_num_draft_tokens: int | None = flag(
        None,
        "most tokens of a request that a decode step computes: the last known one and its drafts; fewer where drafts are often wrong "
        "or rows cost; default: 32 with NGRAM, one more than --speculative-num-steps with a model, 16 with trees",
        least=2,
        most=MAX_DRAFT_TOKENS,
    )


@dataclass(frozen=True, kw_only=True)
class LoraFlags(FlagSet):
    topic = "lora"

    enable_lora: bool = flag(False, "requests may name LoRA adapters; --lora-paths implies it")
    lora_paths: tuple[str, ...] = flag(
        (),
        "LoRA adapters to load at start (PEFT, safetensors): NAME=DIRECTORY, or a directory that serves as its own name",
    )
    max_loras_per_batch: int = flag(8, "most adapters in one batch, not counting the base model", least=1)
    max_lora_rank: int | None = flag(
        None, "highest rank of an adapter; default: 64 on a GPU, no limit on a CPU", least=1
    )
    max_loaded_loras: int | None = flag(None, "most adapters loaded at once; default: no limit", least=1)


@dataclass(frozen=True, kw_only=True)
class OutputFlags(FlagSet):
    topic = "output"

    grammar_backend: str | None = flag(
        None,
        "compiler of JSON schemas, regexes and grammars for constrained answers; default: llguidance, or none with "
        "--skip-tokenizer-init",
        choices=GRAMMAR_BACKENDS,
        refused=dict.fromkeys(("xgrammar", "outlines"), "llguidance compiles all grammars; leave the flag out"),
    )
    constrained_json_disable_any_whitespace: bool = flag(
        False, "generate constrained JSON without whitespace between its parts: fewer tokens"
    )
    tool_call_parser: str | None = flag(
        None, "format of the model's tool calls; default: tool calls stay plain text", choices=TOOL_CALL_PARSERS
    )
    reasoning_parser: str | None = flag(
        None, "format of the model's reasoning; default: it stays part of the text", choices=tuple(REASONING_FORMATS)
    )
    enable_return_hidden_states: bool = flag(False, "requests may ask for hidden states (`return_hidden_states`)")
    is_embedding: bool = flag(False, "serve vectors alone: requests to generate are refused")
    stream_interval: int = flag(1, "tokens between two messages of a stream; a request may set its own", least=1)


# Dataclass fields come from the last base first, so --help starts with ModelFlags.
@dataclass(frozen=True, kw_only=True)
class EngineConfig(
    OutputFlags,
    LoraFlags,
    SpeculativeFlags,
    CacheFlags,
    SchedulingFlags,
    MemoryFlags,
    ParallelFlags,
    ModelFlags,
):
    test_retract: int = setting(0, "decode steps between two forced retractions; 0: none is forced", least=0)
    stream_delay_s: float = setting(
        0.0, "longest of the random delays before steps of a threaded stream", unit="s", least=0
    )

    @property
    def attention_tp_size(self) -> int:
        """Ranks per stage that share attention: with DP attention those of one DP rank."""
        return self.tp_size // self.dp_size if self.enable_dp_attention else self.tp_size

    @property
    def num_ranks(self) -> int:
        """Ranks of one scheduler; with DP attention MLPs span more."""
        return self.attention_tp_size * self.pp_size

    @property
    def watches_steps(self) -> bool:
        """True if the loop does not block on steps: pipeline stages, DP attention."""
        return self.pp_size > 1 or self.enable_dp_attention

    @property
    def ranks_here(self) -> int:
        """Ranks per machine, equal on all."""
        return max(1, self.num_ranks // self.nnodes)

    @property
    def sums_span_nodes(self) -> bool:
        """True if a stage spans machines."""
        return self.ranks_here < self.attention_tp_size


@dataclass(frozen=True, kw_only=True)
class LogFlags(FlagSet):
    topic = "logging"

    log_level: str = flag("info", "lowest level of the log", choices=("debug", "info", "warning", "error"))
    log_format: str = flag("text", "log as text or as one JSON object per line", choices=LOG_FORMATS)
    enable_trace: bool = flag(
        False, "send spans to an OpenTelemetry collector (needs the extra `otel`; OTEL_* variables apply)"
    )
    otlp_traces_endpoint: str | None = flag(
        None, "OTLP/HTTP address of the collector (http://HOST:4318); implies --enable-trace"
    )


@dataclass(frozen=True, kw_only=True)
class AccessFlags(FlagSet):
    topic = "keys"

    api_key: str | None = flag(None, "key that clients must send as 'Authorization: Bearer KEY'")
    api_key_file: str | None = flag(None, "file of API keys, one per line; read again when it changes and on SIGHUP")
    admin_api_key: str | None = flag(
        None,
        "key for calls that change the server (weights, cache, pause, profiles, abort all); default: the API keys do",
    )
    admin_api_key_file: str | None = flag(
        None, "file of admin API keys, one per line; read again when it changes and on SIGHUP"
    )
    allow_insecure: bool = flag(
        False, "listen beyond loopback without keys or a cluster secret: anyone may send any request"
    )
    allowed_hosts: tuple[str, ...] = flag(
        (),
        "host names, besides addresses and localhost, that requests may name if the server listens on loopback without "
        "keys; *: any",
    )
    allowed_origins: tuple[str, ...] = flag(
        (), "web origins (https://HOST[:PORT]) whose pages may send requests and read answers; *: any"
    )


@dataclass(frozen=True, kw_only=True)
class ServerConfig(LogFlags, ImageFlags, AccessFlags):
    """Flags of the HTTP server."""

    topic = "server"

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(30000, "port to listen on", least=0, most=MAX_PORT, special={0: "a free one"})
    middleware: tuple[str, ...] = flag(
        (), "ASGI middleware as MODULE:NAME, the last outermost: a class, or a coroutine function (request, call_next)"
    )
    max_body_bytes: int = flag(64 << 20, "longest request body", unit="bytes", least=1)
    sse_keep_alive_interval_s: float = flag(
        15.0,
        "longest silence of a stream; then a comment keeps proxies from cutting it, and an error has no status any more",
        unit="s",
        least=0,
        special={0.0: "none"},
    )
    max_stored_responses: int = flag(
        1000, "most answers of /v1/responses kept for previous_response_id", least=0, special={0: "none"}
    )
    skip_server_warmup: bool = flag(False, "compute no request before the worker says that it is ready")
    ready_file: str | None = flag(None, "file to write, as JSON, once the server is healthy")
    tokenizer_worker_num: int | None = flag(
        None,
        "frontend processes, which share the port: HTTP, templates, tokenization and detokenization; default: "
        f"{FRONTENDS_OF_MANY} on a GPU from {MANY_RUNNING} running requests on, unless --random-seed or --enable-early-rejection is "
        "given; else 1",
        least=1,
        most=64,
    )
    load_balance_method: str = flag(
        "auto",
        "with --dp-size: which rank gets a request: each in turn, by bootstrap_room, with the fewest requests (shortest_queue, "
        "total_requests) or tokens (minimum_tokens, total_tokens); auto: on prefill workers by bootstrap_room, else in turn",
        choices=LOAD_BALANCE_METHODS,
    )
    enable_early_rejection: bool = flag(
        False,
        "answer 503 at once if the first token is expected after the request's x-request-timeout",
    )
    drain_timeout_s: float = flag(
        30.0,
        "time for running requests after SIGTERM; then they are handed back (503); a second signal ends it at once",
        unit="s",
        least=0,
    )

    @property
    def num_frontends(self) -> int:
        return self.tokenizer_worker_num or 1
