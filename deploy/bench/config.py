"""Flags of `tandem bench`, by vLLM's and SGLang's names where both have them."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deploy.openai_api import check_url
from service.flags import ConfigError, FlagSet, flag

COMPLETIONS, CHAT, GENERATE = "completions", "chat", "generate"
RANDOM, SHAREGPT, CUSTOM = "random", "sharegpt", "custom"
CONCURRENCY = 8  # of a closed loop

METRICS = ("ttft", "tpot", "itl", "e2el")
LIMITED = ("ttft", "tpot", "e2el")
SAMPLING = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")

_OTHER_DATASETS = MappingProxyType(
    {
        "random-ids": "give --dataset-name random and --prompt ids",
        "generated-shared-prefix": "give --shared-prefix-len and --shared-prefix-groups",
        "prefix_repetition": "give --shared-prefix-len and --shared-prefix-groups",
        "mooncake": "give --trace FILE",
        "openai": "give --dataset-name custom; its lines may have messages",
        **dict.fromkeys(
            ("hf", "sonnet", "burstgpt", "spec_bench", "random-mm", "image", "mmmu"),
            "write its requests as JSON lines of prompt and output_tokens, and give --dataset-name custom",
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class TargetFlags(FlagSet):
    url: str = flag("http://127.0.0.1:8000", "server to measure")
    host: str | None = flag(None, "with --port, instead of --url: host of the server")
    port: int | None = flag(None, "instead of --url: port of the server; default host: 127.0.0.1", least=1, most=65535)
    compare: str | None = flag(
        None, "second server, measured in the same run and in turns with the first; prints ratios"
    )
    rounds: int = flag(5, "with --compare: turns over which the requests are spread", least=1)
    api: str = flag(
        COMPLETIONS,
        "endpoint: /v1/completions, /v1/chat/completions, or SGLang's /generate",
        choices=(COMPLETIONS, CHAT, GENERATE),
    )
    model: str | None = flag(None, "model name to send; default: the first of /v1/models")
    served_model_name: str | None = flag(None, "model name to send, where --model is a directory; default: --model")
    tokenizer: str | None = flag(
        None,
        "directory, .gguf file or hub model whose tokenizer counts what the server does not; default: --model, if it "
        "is a directory",
    )
    api_key: str | None = flag(None, "key to send as 'Authorization: Bearer KEY'")
    header: tuple[str, ...] = flag((), "further headers of each request, as NAME=VALUE")


@dataclass(frozen=True, kw_only=True)
class WorkloadFlags(FlagSet):
    num_requests: int = flag(64, "requests to send; from a file: at most", least=1)
    request_rate: float | None = flag(
        None, "open loop: requests per second, with Poisson arrivals; inf: all at once", above=0
    )
    burstiness: float = flag(
        1.0,
        "with --request-rate: shape of the gamma distribution of gaps; 1: Poisson, below: bursts, above: more even",
        above=0,
        below=math.inf,
    )
    dataset_name: str = flag(
        RANDOM,
        "prompts: random; sharegpt or custom: those of --dataset-path",
        choices=(RANDOM, SHAREGPT, CUSTOM),
        refused=_OTHER_DATASETS,
    )
    dataset_path: str | None = flag(
        None,
        "file of requests. sharegpt: JSON of conversations; custom: JSON lines of prompt (text or token ids), messages "
        "or conversations, perhaps with output_tokens",
    )
    dataset_output_len: int | None = flag(
        None,
        "with --dataset-path: tokens to generate; default: as the file says, else --output-len",
        least=1,
        special={-1: "as the file says"},
    )
    dataset_context_len: int | None = flag(
        None, "with --dataset-path: leave out longer requests, in tokens of prompt and answer", least=1
    )
    disable_shuffle: bool = flag(False, "with --dataset-path: take the first requests; default: a sample by --seed")
    trace: str | None = flag(
        None,
        "replay this trace: JSON lines of timestamp (ms), input_length, output_length, hash_ids (Mooncake's format; may "
        "be .gz)",
    )
    time_scale: float = flag(
        1.0, "with --trace: factor on arrival times (0.1: ten times as many requests per second)", least=0
    )
    length_scale: float = flag(1.0, "with --trace: factor on lengths and blocks (0.03: for a CPU)", above=0)
    time_jitter_s: float = flag(
        0.0,
        "with --trace: longest random delay of an arrival (some traces have coarse clocks)",
        unit="s",
        least=0,
    )
    prompt: str = flag(
        "words",
        "prompts of random words ('k17 v42': one token each for the shipped model) or of token ids",
        choices=("words", "ids"),
    )
    input_len: int = flag(256, "prompt length, in words or tokens", least=1)
    output_len: int = flag(32, "tokens to generate", least=1)
    random_range_ratio: float = flag(
        1.0,
        "lengths are drawn from [RATIO * length, length], as in SGLang; vLLM: [(1 - RATIO) * length, (1 + RATIO) * length]",
        least=0,
        most=1,
    )
    shared_prefix_len: int = flag(0, "words or tokens at the start of each prompt that its group shares", least=0)
    shared_prefix_groups: int = flag(1, "groups of requests with a common prefix", least=1)
    min_token_id: int = flag(16, "lowest random token id", least=0)
    max_token_id: int = flag(500, "highest random token id")
    seed: int = flag(0, "seed of lengths, prompts and arrivals")


@dataclass(frozen=True, kw_only=True)
class SamplingFlags(FlagSet):
    ignore_eos: bool = flag(True, "generate the full output length")
    temperature: float = flag(0.0, "sampling temperature", least=0)
    top_p: float | None = flag(None, "sampling parameter top_p; default: the server's", above=0, most=1)
    top_k: int | None = flag(None, "sampling parameter top_k; default: the server's")
    min_p: float | None = flag(None, "sampling parameter min_p; default: the server's", least=0, most=1)
    frequency_penalty: float | None = flag(None, "sampling parameter frequency_penalty; default: the server's")
    presence_penalty: float | None = flag(None, "sampling parameter presence_penalty; default: the server's")
    repetition_penalty: float | None = flag(None, "sampling parameter repetition_penalty; default: the server's")
    extra_request_body: str | None = flag(None, "JSON object with further fields of each request")

    def sampling(self) -> dict[str, float]:
        """Given parameters by their names in a request."""
        return {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}

    def extra_fields(self) -> dict[str, Any]:
        """Raises ConfigError."""
        try:
            found = json.loads(self.extra_request_body or "{}")
        except ValueError as error:
            raise ConfigError(f"--extra-request-body: is no JSON ({error}); write '{{\"top_p\": 0.9}}'") from None
        if not isinstance(found, dict):
            raise ConfigError("--extra-request-body: must be a JSON object; write '{\"top_p\": 0.9}'")
        return found


@dataclass(frozen=True, kw_only=True)
class ReportFlags(FlagSet):
    goodput: tuple[str, ...] = flag(
        (), "objectives of a good request, in ms: ttft:MS, tpot:MS, e2el:MS; reports good requests per second"
    )
    percentile_metrics: str = flag(",".join(METRICS), "latencies to report, of ttft, tpot, itl and e2el")
    metric_percentiles: str = flag("50,90,99", "percentiles to report")
    output: str | None = flag(None, "file to write with the result and each request, as JSON")
    save_result: bool = flag(False, "write the result to a file with vLLM's names")
    save_detailed: bool = flag(False, "with --save-result: also each request's lengths, latencies, text and error")
    append_result: bool = flag(False, "add the result to the file of --result-filename, a line for each run")
    result_dir: str | None = flag(None, "directory of --save-result; default: this one")
    result_filename: str | None = flag(
        None, "file of --save-result; default: LABEL-RATEqps-MODEL-DATE.json, with the concurrency if there is one"
    )
    label: str | None = flag(None, "label in the result; default: the API")
    metadata: tuple[str, ...] = flag((), "further values of the result, as NAME=VALUE")
    output_file: str | None = flag(None, "file to add a line to with SGLang's names (JSON lines)")
    output_details: bool = flag(False, "with --output-file: also each request's lengths, latencies, text and error")

    def goodput_limits(self) -> dict[str, float]:
        """Seconds by metric. Raises ConfigError."""
        found = {}
        for text in self.goodput:
            name, _, limit = text.partition(":")
            if name not in LIMITED:
                raise ConfigError(f"--goodput {text}: write METRIC:MS with one of {', '.join(LIMITED)}, as ttft:500")
            found[name] = _number(f"--goodput {text}", limit, "write milliseconds behind the colon, as ttft:500") / 1e3
        return found

    def metrics(self) -> tuple[str, ...]:
        """Raises ConfigError."""
        names = tuple(name.strip() for name in self.percentile_metrics.split(",") if name.strip())
        for name in names:
            if name not in METRICS:
                raise ConfigError(f"--percentile-metrics: {name!r} is not measured; name some of {', '.join(METRICS)}")
        return names

    def percents(self) -> tuple[float, ...]:
        """Raises ConfigError."""
        remedy = "write numbers from 0 to 100 with commas, as 50,99"
        return tuple(
            _number("--metric-percentiles", text, remedy, most=100) for text in self.metric_percentiles.split(",")
        )


# Dataclass fields come from the last base first, so --help starts with TargetFlags.
@dataclass(frozen=True, kw_only=True)
class BenchConfig(ReportFlags, SamplingFlags, WorkloadFlags, TargetFlags):
    concurrency: int | None = flag(
        None,
        f"requests in flight at most; default: {CONCURRENCY} in a closed loop, no limit with --request-rate or --trace",
        least=1,
    )
    stream: bool = flag(True, "stream the answers (needed for TTFT and ITL)")
    warmup: int = flag(2, "requests to send before the measurement", least=0)
    request_timeout_s: float = flag(600.0, "longest time for one request", unit="s", above=0)
    disable_progress: bool = flag(False, "show no progress bar")

    @property
    def urls(self) -> list[str]:
        first = self.url
        if self.host is not None or self.port is not None:
            host = self.host or "127.0.0.1"
            first = f"http://{f'[{host}]' if ':' in host else host}:{self.port or 8000}"
        return [first, self.compare] if self.compare else [first]

    @property
    def in_flight(self) -> int:
        return self.concurrency or CONCURRENCY

    def headers(self) -> dict[str, str]:
        """Raises ConfigError."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return key | pairs_of("--header", self.header)


def check_bench(config: BenchConfig) -> None:
    """Raises ConfigError."""
    for name, url in zip(("--url", "--compare"), config.urls, strict=False):
        check_url(name, url)
    if config.trace is not None and config.request_rate is not None:
        raise ConfigError("--request-rate: a trace has its own arrival times; use --time-scale, or leave out --trace")
    if config.max_token_id <= config.min_token_id:
        raise ConfigError(f"--max-token-id: must exceed --min-token-id, got {config.max_token_id}")
    if config.shared_prefix_len > config.input_len:
        raise ConfigError(f"--shared-prefix-len: must not exceed --input-len, got {config.shared_prefix_len}")
    if config.api == CHAT and config.prompt == "ids" and config.dataset_name == RANDOM:
        raise ConfigError("--prompt ids: a chat has texts; give --prompt words, or --api completions")
    _check_dataset(config)
    _check_report(config)
    config.extra_fields()
    config.headers()


def pairs_of(option: str, texts: tuple[str, ...]) -> dict[str, str]:
    """Parse NAME=VALUE words. Raises ConfigError."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name.strip() and equals):
            raise ConfigError(f"{option} {text}: write NAME=VALUE")
        found[name.strip()] = value.strip()
    return found


def _check_dataset(config: WorkloadFlags) -> None:
    if config.dataset_name != RANDOM and config.dataset_path is None:
        raise ConfigError(f"--dataset-path: --dataset-name {config.dataset_name} reads a file; give its path")
    if config.dataset_name == RANDOM and config.dataset_path is not None:
        raise ConfigError("--dataset-path: what is in it? give --dataset-name sharegpt or custom")
    if config.dataset_path is not None and config.trace is not None:
        raise ConfigError("--trace: prompts come from --dataset-path already; give one of them")


def _check_report(config: BenchConfig) -> None:
    config.goodput_limits()
    config.metrics()
    config.percents()
    pairs_of("--metadata", config.metadata)
    if config.append_result and config.result_filename is None:
        raise ConfigError("--append-result: to which file? give --result-filename")
    saves = config.save_result or config.append_result
    for option, is_given, needs, there in (
        ("--save-detailed", config.save_detailed, "--save-result", saves),
        ("--output-details", config.output_details, "--output-file", config.output_file is not None),
    ):
        if is_given and not there:
            raise ConfigError(f"{option}: needs {needs}; nothing is written without it")
    if config.compare and (saves or config.output_file):
        option = "--save-result" if saves else "--output-file"
        raise ConfigError(f"{option}: holds the result of one server; leave out --compare, or give --output")
    for option, path in (("--output", config.output), ("--output-file", config.output_file)):
        if path and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{option}: {Path(path).parent} is no directory; create it first")


def _number(option: str, text: str, remedy: str, *, most: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{option}: {text!r} is no number; {remedy}") from None
    if not 0 <= value <= most:
        raise ConfigError(f"{option}: {text} is out of range; {remedy}")
    return value
