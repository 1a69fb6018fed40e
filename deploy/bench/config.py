"""Flags of `tandem bench`."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from engine.config import flag
from service.flags import ConfigError


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One measurement: which server, which load, which prompts, where the result goes."""

    url: str = flag("http://127.0.0.1:8000", "server to measure")
    compare: str | None = flag(None, "second server: measured in the same run, in turns with the first; prints ratios")
    rounds: int = flag(5, "turns that the requests are dealt out to with --compare")
    api: str = flag("completions", "endpoint: /v1/completions or /v1/chat/completions", choices=("completions", "chat"))
    model: str | None = flag(None, "model name to send; default: the first of /v1/models")
    api_key: str | None = flag(None, "sent as 'Authorization: Bearer KEY'")

    num_requests: int = flag(64, "requests to send (of a trace: at most)")
    concurrency: int = flag(8, "closed loop: requests in flight; each answer starts the next request")
    request_rate: float | None = flag(
        None, "open loop: requests per second with Poisson arrivals, whatever is in flight"
    )
    trace: str | None = flag(
        None,
        "replay this trace: JSON lines of timestamp (ms), input_length, output_length, hash_ids (Mooncake's form; may be .gz)",
    )
    time_scale: float = flag(1.0, "trace: arrival times are multiplied by this (0.1: ten times as fast)")
    length_scale: float = flag(1.0, "trace: lengths and blocks are multiplied by this (0.03: for a CPU)")
    time_jitter_ms: float = flag(
        0.0, "trace: a random delay up to this for each arrival (some traces have coarse clocks)"
    )

    prompt: str = flag(
        "words",
        "prompts of random words ('k17 v42': one token each for the shipped model) or token ids",
        choices=("words", "ids"),
    )
    input_len: int = flag(256, "prompt length in words or tokens")
    output_len: int = flag(32, "tokens to generate")
    random_range_ratio: float = flag(1.0, "lengths are drawn from [RATIO * length, length]")
    shared_prefix_len: int = flag(0, "words or tokens at the start of each prompt that all of its group share")
    shared_prefix_groups: int = flag(1, "groups of requests with a common prefix")
    min_token_id: int = flag(16, "lowest random token id")
    max_token_id: int = flag(500, "highest random token id")
    stream: bool = flag(True, "stream the answers (needed for TTFT and ITL)")
    ignore_eos: bool = flag(True, "generate the full output length")
    temperature: float = flag(0.0, "sampling temperature")
    seed: int = flag(0, "seed of lengths, prompts and arrivals")

    warmup: int = flag(2, "requests sent before the measurement")
    request_timeout: float = flag(600.0, "seconds one request may take")
    output: str | None = flag(None, "write the result as JSON here")
    disable_progress: bool = flag(False, "no progress bar")


def check_bench(config: BenchConfig) -> None:
    """Raise `ConfigError` for the first flag that cannot be honoured."""
    for name, url in (("--url", config.url), ("--compare", config.compare)):
        if url is not None and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
            raise ConfigError(f"{name}: {url!r} is no address; give http://HOST:PORT")
    if config.trace is not None and config.request_rate is not None:
        raise ConfigError("--request-rate: a trace has its own arrival times; use --time-scale, or leave out --trace")
    for name in ("rounds", "num_requests", "concurrency", "input_len", "output_len", "shared_prefix_groups"):
        _require(getattr(config, name) >= 1, name, "must be at least 1", getattr(config, name))
    for name in ("warmup", "shared_prefix_len", "min_token_id", "time_scale", "time_jitter_ms", "temperature"):
        _require(getattr(config, name) >= 0, name, "must be at least 0", getattr(config, name))
    for name in ("length_scale", "request_timeout"):
        _require(getattr(config, name) > 0, name, "must be greater than 0", getattr(config, name))
    rate = config.request_rate
    _require(rate is None or 0 < rate < float("inf"), "request_rate", "must be a finite number greater than 0", rate)
    _require(0 <= config.random_range_ratio <= 1, "random_range_ratio", "must be 0 to 1", config.random_range_ratio)
    _require(
        config.max_token_id > config.min_token_id, "max_token_id", "must exceed --min-token-id", config.max_token_id
    )
    _require(
        config.shared_prefix_len <= config.input_len,
        "shared_prefix_len",
        "must not exceed --input-len",
        config.shared_prefix_len,
    )


def _require(ok: bool, name: str, message: str, value: object) -> None:
    if not ok:
        raise ConfigError(f"--{name.replace('_', '-')}: {message}, got {value}")
