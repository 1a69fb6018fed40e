"""Flags of `tandem bench`."""

import math
from dataclasses import dataclass

from deploy.openai_api import check_url
from service.flags import ConfigError, FlagSet, flag


@dataclass(frozen=True, kw_only=True)
class TargetFlags(FlagSet):
    url: str = flag("http://127.0.0.1:8000", "server to measure")
    compare: str | None = flag(
        None, "second server, measured in the same run and in turns with the first; prints ratios"
    )
    rounds: int = flag(5, "with --compare: turns over which the requests are spread", least=1)
    api: str = flag("completions", "endpoint: /v1/completions or /v1/chat/completions", choices=("completions", "chat"))
    model: str | None = flag(None, "model name to send; default: the first of /v1/models")
    api_key: str | None = flag(None, "key to send as 'Authorization: Bearer KEY'")


@dataclass(frozen=True, kw_only=True)
class WorkloadFlags(FlagSet):
    num_requests: int = flag(64, "requests to send; with --trace: at most", least=1)
    request_rate: float | None = flag(
        None, "open loop: requests per second, with Poisson arrivals", above=0, below=math.inf
    )
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
    random_range_ratio: float = flag(1.0, "lengths are drawn from [RATIO * length, length]", least=0, most=1)
    shared_prefix_len: int = flag(0, "words or tokens at the start of each prompt that its group shares", least=0)
    shared_prefix_groups: int = flag(1, "groups of requests with a common prefix", least=1)
    min_token_id: int = flag(16, "lowest random token id", least=0)
    max_token_id: int = flag(500, "highest random token id")
    seed: int = flag(0, "seed of lengths, prompts and arrivals")


# Dataclass fields come from the last base first, so --help starts with TargetFlags.
@dataclass(frozen=True, kw_only=True)
class BenchConfig(WorkloadFlags, TargetFlags):
    concurrency: int = flag(8, "closed loop: requests in flight; each answer starts the next request", least=1)
    stream: bool = flag(True, "stream the answers (needed for TTFT and ITL)")
    ignore_eos: bool = flag(True, "generate the full output length")
    temperature: float = flag(0.0, "sampling temperature", least=0)
    warmup: int = flag(2, "requests to send before the measurement", least=0)
    request_timeout_s: float = flag(600.0, "longest time for one request", unit="s", above=0)
    output: str | None = flag(None, "file to write with the result, as JSON")
    disable_progress: bool = flag(False, "show no progress bar")

    @property
    def urls(self) -> list[str]:
        return [self.url, self.compare] if self.compare else [self.url]


def check_bench(config: BenchConfig) -> None:
    """Raise ConfigError for the first invalid combination of flags."""
    for name, url in (("--url", config.url), ("--compare", config.compare)):
        if url is not None:
            check_url(name, url)
    if config.trace is not None and config.request_rate is not None:
        raise ConfigError("--request-rate: a trace has its own arrival times; use --time-scale, or leave out --trace")
    if config.max_token_id <= config.min_token_id:
        raise ConfigError(f"--max-token-id: must exceed --min-token-id, got {config.max_token_id}")
    if config.shared_prefix_len > config.input_len:
        raise ConfigError(f"--shared-prefix-len: must not exceed --input-len, got {config.shared_prefix_len}")
