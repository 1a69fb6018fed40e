"""The engine's flags. Frozen; every field is one `--flag` (deploy/flags.py derives them), named as SGLang names it.

`None` means "unset: resolve() fills it in"; an explicit value that cannot be honoured is an error naming the flag.
"""

from dataclasses import dataclass, field
from typing import Any

from engine.core.host_cache import PREFETCH_POLICIES, WRITE_POLICIES
from engine.core.policy import POLICIES
from service.telemetry.logs import FORMATS as LOG_FORMATS

GRAMMAR_BACKENDS = ("llguidance", "xgrammar", "none")
TOOL_CALL_PARSERS = ("qwen25", "qwen", "llama3")


def flag(default: Any, help: str, *, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Model, memory and scheduling of one engine."""

    model_path: str = flag(
        "",
        "a checkpoint directory (config.json, *.safetensors, tokenizer.json), a .gguf file, a model of the Hugging Face "
        "hub (ORGANIZATION/NAME), or smollm2; default: the model that ships with Tandem",
    )
    revision: str | None = flag(None, "branch, tag or commit of a model of the hub; default: its main branch")
    served_model_name: str | None = flag(
        None, "name in /v1/models and answers; default: that of the directory, the file or the hub"
    )
    dtype: str = flag("auto", "weights and KV cache", choices=("auto", "bfloat16", "float32"))
    device: str = flag("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    attention_backend: str = flag("auto", "attention kernels", choices=("auto", "cpu", "torch", "triton"))
    stream: str = flag(
        "auto", "executor stream: inline and threaded are for cpu", choices=("auto", "inline", "threaded", "cuda")
    )
    page_size: int = flag(16, "tokens in a KV page")
    context_length: int | None = flag(None, "longest prompt plus answer in tokens; default: the model's")
    max_total_tokens: int | None = flag(None, "KV capacity in tokens; default: from --mem-fraction-static")
    mem_fraction_static: float = flag(
        0.2, "share of free memory for the KV cache when --max-total-tokens is unset (capped at 4 GiB on cpu)"
    )
    prefault_kv: bool = flag(
        False, "on cpu: touch all KV memory at start, so that no step waits until the system finds it"
    )
    max_running_requests: int = flag(64, "requests in the running batch")
    max_queued_requests: int = flag(4096, "requests that may wait; one more is answered 503")
    chunked_prefill_size: int | None = flag(
        None,
        "prompt tokens in one step; longer prompts go in chunks, the end of one may be a 16th more; -1: no chunking; "
        "default: 1024 on cpu, 8192 on cuda",
    )
    max_step_ms: float | None = flag(
        None,
        "milliseconds that a step with prompts should take at most: it holds as many prompt tokens as the measured speed "
        "allows, a page at least, --chunked-prefill-size at most; 0: no limit; default: 1000 on cpu, 500 on cuda",
    )
    max_prefill_tokens: int = flag(16384, "most prompt tokens in one prefill batch when chunking is off")
    prefill_max_requests: int | None = flag(None, "most prompts in one prefill step; default: no limit")
    enable_mixed_chunk: bool | None = flag(
        None, "running decodes ride along in a prefill step; default: yes on cpu, no on cuda"
    )
    schedule_policy: str = flag("fcfs", "order of the waiting queue", choices=POLICIES)
    schedule_conservativeness: float = flag(
        1.0, "above 1: fewer requests run at once, fewer are retracted; below 1: the other way round"
    )
    enable_priority_scheduling: bool = flag(False, "requests with a higher `priority` value go first")
    schedule_low_priority_values_first: bool = flag(False, "with priority scheduling: lower values go first")
    priority_scheduling_preemption_threshold: int = flag(
        10, "a waiting request takes the place of a running one whose priority is lower by more than this"
    )
    priority_aging_seconds: float | None = flag(
        None, "with priority scheduling: each so many seconds of waiting raise a request by one, so nobody starves"
    )
    disable_consecutive_prefill_overlap: bool = flag(
        False, "of two prefill steps in a row the second waits for the results of the first: earlier first tokens"
    )
    disable_radix_cache: bool = flag(False, "do not reuse the KV of equal prefixes")
    enable_hierarchical_cache: bool = flag(False, "evicted prefixes are kept in host memory, and come back from there")
    hicache_ratio: float = flag(2.0, "host memory for prefixes, as a multiple of the KV cache on the device")
    hicache_size: float = flag(0.0, "host memory for prefixes in GB (of 10^9 bytes); 0: by --hicache-ratio")
    hicache_write_policy: str = flag(
        "write_through",
        "when prefixes are copied to the host: when computed, when a second request reads them, or when evicted",
        choices=WRITE_POLICIES,
    )
    hicache_storage_backend: str | None = flag(
        None, "where host prefixes go besides: files in --hicache-storage-dir; default: nowhere", choices=("file",)
    )
    hicache_storage_dir: str | None = flag(None, "folder of prefix files; each worker takes a numbered folder in it")
    hicache_storage_size_gb: float = flag(10.0, "most GB (of 10^9 bytes) of prefix files of a worker; the oldest go")
    hicache_storage_prefetch_policy: str = flag(
        "best_effort",
        "a request whose prefix is being read from files: goes on with what is there, waits for all, or for some time",
        choices=PREFETCH_POLICIES,
    )
    hicache_storage_prefetch_timeout: float = flag(1.0, "prefetch policy timeout: seconds a request waits at most")
    kv_events_config: str | None = flag(
        None, 'publish what happens in the prefix cache over ZMQ; JSON such as {"endpoint": "tcp://127.0.0.1:5557"}'
    )
    disable_overlap_schedule: bool = flag(False, "depth 1: collect each step before the next is launched")
    disable_cuda_graph: bool = flag(
        False, "decode steps are launched kernel by kernel, not as graphs (on a CPU: as tapes)"
    )
    cuda_graph_max_bs: int | None = flag(
        None, "largest batch that decodes as a graph; default: --max-running-requests, at most 256"
    )
    cuda_graph_bs: tuple[int, ...] = flag((), "batch sizes to make graphs of, instead of the default choice")
    enable_lora: bool = flag(False, "requests may name LoRA adapters; --lora-paths asks for it as well")
    lora_paths: tuple[str, ...] = flag(
        (), "adapters to load at start, each NAME=DIRECTORY or a directory that is its own name (PEFT, safetensors)"
    )
    max_loras_per_batch: int = flag(8, "adapters in one batch, the model alone not counted; requests for more wait")
    max_lora_rank: int | None = flag(None, "highest rank of an adapter; default: any")
    max_loaded_loras: int | None = flag(None, "adapters that may be loaded at once; default: no limit")
    lora_drain_wait_threshold: float = flag(
        10.0, "seconds after which a request that waits for its adapter's turn is given the next place; 0: never"
    )
    grammar_backend: str = flag(
        "llguidance", "compiles JSON schemas, regexes and grammars for constrained answers", choices=GRAMMAR_BACKENDS
    )
    grammar_compile_timeout: float = flag(10.0, "seconds after which a grammar that does not compile is refused")
    grammar_cache_size: int = flag(256, "compiled grammars that are kept; the least recently used goes")
    constrained_json_disable_any_whitespace: bool = flag(
        False, "constrained JSON has no whitespace between its parts: fewer tokens"
    )
    tool_call_parser: str | None = flag(
        None, "how the model writes tool calls; default: its calls are plain text", choices=TOOL_CALL_PARSERS
    )
    enable_return_hidden_states: bool = flag(False, "requests may ask for hidden states (`return_hidden_states`)")
    embedding_pooling: str = flag(
        "last", "what of a prompt's hidden states /v1/embeddings gives, at unit length", choices=("last", "mean")
    )
    stream_interval: int = flag(1, "tokens between two messages to a client that streams; a request may bring its own")
    scheduler_recv_interval: int = flag(1, "pure decode steps between two looks at new requests")
    decode_log_interval: int = flag(40, "steps between two log lines about prefill, decode and memory")
    watchdog_timeout: float = flag(
        300.0, "seconds that one turn of the scheduler may take before it shows its stacks and ends; 0: any time"
    )
    weight_version: str = flag("default", "name of the weights in meta_info, until an update gives another")
    num_threads: int | None = flag(
        None,
        "threads that compute on cpu; default: one a core (or OMP_NUM_THREADS), but no more than one for each 64 MiB of weights",
    )
    stream_delay_ms: float = flag(0.0, "threaded stream: random delay up to this before each step (to shake out races)")
    random_seed: int | None = flag(
        None, "seed of the seeds that requests without one are given; default: drawn at start, see /server_info"
    )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP side of one worker."""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(30000, "port to listen on; 0: a free one")
    api_key: str | None = flag(None, "clients must send this as 'Authorization: Bearer KEY'")
    api_key_file: str | None = flag(None, "file of such keys, one a line; read anew when it changes, and on SIGHUP")
    admin_api_key: str | None = flag(
        None, "key for what changes the server (weights, cache, pause, profiles, abort all); default: the API keys do"
    )
    admin_api_key_file: str | None = flag(None, "file of admin keys, one a line; read anew as the other")
    allow_insecure: bool = flag(False, "listen off loopback without keys or a cluster secret: anybody may do anything")
    allowed_hosts: tuple[str, ...] = flag(
        (),
        "names, besides addresses and localhost, by which clients may reach a server on loopback without keys; *: any",
    )
    allowed_origins: tuple[str, ...] = flag(
        (), "sites, as https://HOST[:PORT], whose pages may send requests that change something; *: any"
    )
    log_level: str = flag("info", "log level", choices=("debug", "info", "warning", "error"))
    log_format: str = flag("text", "lines for people, or one JSON object each", choices=LOG_FORMATS)
    enable_trace: bool = flag(False, "send spans to an OpenTelemetry collector (extra `otel`; OTEL_* variables hold)")
    otlp_traces_endpoint: str | None = flag(
        None, "OTLP/HTTP address of the collector, as http://HOST:4318; says --enable-trace"
    )
    trace_ring: int = flag(512, "requests whose times are kept for `tandem trace`; 0: none")
    max_body_bytes: int = flag(64 << 20, "longest request body")
    ready_file: str | None = flag(None, "write JSON here once the server is healthy")
    enable_early_rejection: bool = flag(
        False,
        "503 at once for a request whose first token would come after its x-request-timeout (or --default-deadline)",
    )
    default_deadline: float | None = flag(
        None, "seconds that requests without x-request-timeout may wait; default: for ever"
    )
    drain_timeout: float = flag(
        30.0, "seconds that running requests get after SIGTERM; then they are handed back (503); a second signal: none"
    )
