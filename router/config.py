"""The router's flags, named as in SGLang's router, and their check."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from service.flags import ConfigError, FlagSet, flag
from service.images.hosts import AllowedHosts, ImageFlags
from service.telemetry.context import FORMATS as LOG_FORMATS

BY_LOAD, BY_CACHE = "least_load", "cache_aware"
POLICIES = (BY_LOAD, BY_CACHE, "power_of_two", "round_robin", "random", "consistent_hashing")
ROUTES = {"auto": ("prefill", "decode"), "pair": (), "decode": ("decode",), "prefill": ("prefill",)}  # whole at
MAX_PORT = 65535


def _seconds(
    default: float, help: str, *, above: float | None = None, zero: str | None = None, option: str | None = None
) -> Any:
    """`zero` describes 0."""
    least = 0 if above is None else None
    special = {} if zero is None else {0.0: zero}
    return flag(default, help, unit="s", above=above, least=least, special=special, option=option)


@dataclass(frozen=True, kw_only=True)
class WorkerFlags(FlagSet):
    topic = "workers"

    pd_disaggregation: bool = flag(False, "send each request to a prefill and a decode worker, not to a unified one")
    prefill: tuple[tuple[str, int | None], ...] = flag(
        (), "URL [BOOTSTRAP_PORT] of a prefill worker; repeatable; default port: as the worker reports", by_hand=True
    )
    decode: tuple[str, ...] = flag((), "URL of a decode worker; repeatable", by_hand=True)
    worker_urls: tuple[str, ...] = flag((), "URLs of unified workers (alone, or beside pairs)", by_hand=True)
    encode: tuple[str, ...] = flag(
        (),
        "URL of an encoder worker, which computes images for prefill and unified workers; repeatable",
        by_hand=True,
    )
    route: str = flag(
        "auto",
        "where a request is computed and answered: by a pair, whole at one worker, or where it costs least (docs/router.md)",
        choices=tuple(ROUTES),
    )


@dataclass(frozen=True, kw_only=True)
class ListenFlags(FlagSet):
    topic = "server"

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(30080, "port to listen on", least=0, most=MAX_PORT, special={0: "a free one"})
    workers: int = flag(1, "router processes, which share the port, the pool and their view of the load", least=1)
    drain_timeout_s: float = _seconds(30.0, "time for running requests after SIGTERM; then they are answered 503")
    max_body_bytes: int = flag(64 << 20, "longest request body", unit="bytes", least=1)
    max_stored_responses: int = flag(
        1000, "most answers of /v1/responses kept for previous_response_id", least=0, special={0: "none"}
    )
    sse_keep_alive_interval_s: float = _seconds(
        15.0, "longest silence of a stream; then a comment keeps proxies from cutting it", zero="none"
    )
    ready_file: str | None = flag(None, "file to write, as JSON, once the router listens")


@dataclass(frozen=True, kw_only=True)
class ChoiceFlags(FlagSet):
    topic = "routing"

    policy: str | None = flag(
        None,
        f"how workers are chosen (docs/router.md); default: {BY_CACHE}, with a fixed --route {BY_LOAD}",
        choices=POLICIES,
    )
    prefill_policy: str | None = flag(None, "how prefill workers are chosen; default: --policy", choices=POLICIES)
    decode_policy: str | None = flag(None, "how decode workers are chosen; default: --policy", choices=POLICIES)
    cache_threshold: float = flag(0.3, "cache_aware: least cached share of a prompt that is a match", least=0, most=1)
    balance_abs_threshold: int = flag(
        64, "cache_aware: ignore the cache if queue lengths differ by more (and by --balance-rel-threshold)", least=0
    )
    balance_rel_threshold: float = flag(
        1.5, "cache_aware: ignore the cache if they differ by a larger factor (and by --balance-abs-threshold)", least=1
    )
    max_tree_size: int = flag(1 << 26, "cache_aware: bytes of prompts to remember per worker", unit="bytes", least=1)
    disable_kv_events: bool = flag(False, "cache_aware: do not follow the KV events that workers publish")

    @property
    def default_policy(self) -> str:  # of roles without their own
        return self.policy or BY_LOAD


@dataclass(frozen=True, kw_only=True)
class HealthFlags(FlagSet):
    topic = "health"

    health_check_interval_s: float = _seconds(
        1.0, "time between two health checks of a worker", above=0, option="--health-check-interval-secs"
    )
    health_check_timeout_s: float = _seconds(
        5.0, "longest time for a health check", above=0, option="--health-check-timeout-secs"
    )
    health_silence_s: float = _seconds(
        1.0, "silence after which other workers are preferred, and take over what runs there", zero="no limit"
    )
    disable_moves: bool = flag(False, "requests at a worker that is silent or drains stay there")
    disable_kv_moves: bool = flag(False, "requests move without their KV: a prefill worker computes it again")
    rebalance_above: float = flag(
        0.0,
        "share of its KV memory above which a decode worker gives running requests to one with room",
        least=0,
        most=1,
        special={0: "never"},
    )
    health_failure_threshold: int = flag(2, "failed health checks in a row that take a worker out", least=1)
    health_success_threshold: int = flag(1, "good health checks in a row that bring a worker back", least=1)
    load_poll_interval_s: float = _seconds(1.0, "time between two polls of a worker's load", zero="own counts alone")
    dead_worker_timeout_s: float = _seconds(
        30.0, "time without a byte or a good health check after which a request fails or moves", zero="no limit"
    )


@dataclass(frozen=True, kw_only=True)
class BreakerFlags(FlagSet):
    topic = "breaker"

    cb_failure_threshold: int = flag(10, "failures of a worker in a row that open its circuit breaker", least=1)
    cb_success_threshold: int = flag(3, "answers (and requests at a time) that close a circuit breaker again", least=1)
    cb_timeout_duration_s: float = _seconds(
        60.0, "time for which an open circuit breaker keeps requests away", option="--cb-timeout-duration-secs"
    )
    cb_window_duration_s: float = _seconds(
        120.0, "time for which a failure counts for the breaker", option="--cb-window-duration-secs"
    )
    disable_circuit_breaker: bool = flag(False, "failed requests never exclude a worker; health checks alone decide")


@dataclass(frozen=True, kw_only=True)
class AdmissionFlags(FlagSet):
    topic = "admission"

    max_concurrent_requests: int = flag(16384, "most requests at a time; more wait (--queue-size) or get 429", least=1)
    max_concurrent_requests_per_client: int = flag(
        0, "most requests served at a time per API key (without keys: per address)", least=0, special={0: "no limit"}
    )
    queue_size: int = flag(0, "requests that wait (per process) at a limit", least=0, special={0: "none"})
    queue_timeout_s: float = _seconds(60.0, "longest wait in the queue (then: 429)", option="--queue-timeout-secs")
    slo_ttft_s: float = _seconds(0.0, "refuse (429) if the predicted TTFT exceeds this (X-SLO-TTFT-ms)", zero="never")
    slo_itl_s: float = _seconds(0.0, "refuse (429) if the predicted ITL exceeds this (X-SLO-ITL-ms)", zero="never")
    rate_limit_requests_per_second: float = flag(
        0.0, "most requests per second of an API key (without keys: address)", least=0, special={0: "no limit"}
    )
    rate_limit_burst: int = flag(0, "largest burst under the rate limit", least=0, special={0: "that of two seconds"})


@dataclass(frozen=True, kw_only=True)
class AutoRolesFlags(FlagSet):
    topic = "roles"

    auto_roles: bool = flag(False, "move workers between prefill and decode as the load requires (docs/router.md)")
    auto_roles_interval_s: float = _seconds(1.0, "auto roles: time between two looks at the pools", above=0)
    auto_roles_min_prefill: int = flag(1, "auto roles: fewest prefill workers of each model", least=1)
    auto_roles_min_decode: int = flag(1, "auto roles: fewest decode workers of each model", least=1)
    auto_roles_enter: float = flag(0.9, "auto roles: share of its capacity at which a pool becomes short of workers")
    auto_roles_leave: float = flag(0.7, "auto roles: share of its capacity below which it is no longer short", above=0)
    auto_roles_sustain_s: float = _seconds(15.0, "auto roles: time for which a pool must be short (at least a move's)")
    auto_roles_cooldown_s: float = _seconds(60.0, "auto roles: pause before a move back, or after a failed one")
    auto_roles_switch_time_s: float = _seconds(30.0, "auto roles: duration of a move until one has been measured")
    auto_roles_ttft_s: float = _seconds(2.0, "auto roles: wait of prompts at which prefill is short", above=0)
    auto_roles_itl_s: float = _seconds(0.0, "auto roles: inter-token latency at which decode is short", zero="any")


@dataclass(frozen=True, kw_only=True)
class DiscoveryFlags(FlagSet):
    topic = "discovery"

    service_discovery: bool = flag(False, "find workers as Kubernetes pods, by the selectors (needs tandem-serve[k8s])")
    selector: tuple[str, ...] = flag((), "labels KEY=VALUE of unified workers' pods (alone, or beside pairs)")
    prefill_selector: tuple[str, ...] = flag((), "labels KEY=VALUE of prefill workers' pods")
    decode_selector: tuple[str, ...] = flag((), "labels KEY=VALUE of decode workers' pods")
    encode_selector: tuple[str, ...] = flag((), "labels KEY=VALUE of encoder workers' pods; default: there are none")
    service_discovery_port: int = flag(80, "port that workers listen on in their pods", least=1, most=MAX_PORT)
    service_discovery_namespace: str | None = flag(None, "namespace of the pods; default: all (needs a ClusterRole)")


@dataclass(frozen=True, kw_only=True)
class KeyFlags(FlagSet):
    topic = "keys"

    api_key: str | None = flag(None, "key that clients must send as 'Authorization: Bearer KEY'")
    api_key_file: str | None = flag(None, "file of API keys, one per line; read again when it changes and on SIGHUP")
    admin_api_key: str | None = flag(None, "key for calls that change workers or the pool; default: the API keys")
    admin_api_key_file: str | None = flag(None, "file of admin API keys, one per line; read again like --api-key-file")
    allow_insecure: bool = flag(False, "listen beyond loopback without API keys: anyone may send any request")
    allowed_hosts: tuple[str, ...] = flag((), "host names that requests may use on loopback without keys; *: any")
    allowed_origins: tuple[str, ...] = flag(
        (), "web origins (https://HOST[:PORT]) that may send requests and read answers; *: any"
    )
    middleware: tuple[str, ...] = flag(
        (), "ASGI middleware as MODULE:NAME, the last outermost: a class, or a coroutine function (request, call_next)"
    )
    worker_api_key: str | None = flag(None, "API key sent to workers; default: the client's Authorization")
    worker_api_key_file: str | None = flag(
        None, "file with the workers' API key in its first line; read again when it changes"
    )
    worker_admin_api_key: str | None = flag(None, "key of admin calls to workers; default: the caller's Authorization")
    worker_admin_api_key_file: str | None = flag(None, "file with the workers' admin API key in its first line")
    cluster_secret_file: str | None = flag(None, "file of the cluster's secret; with it decode workers get vouchers")


@dataclass(frozen=True, kw_only=True)
class RetryFlags(FlagSet):
    topic = "retries"

    retry_max: int = flag(3, "most retries while nothing was sent to the client", least=0, special={0: "none"})
    retry_backoff_s: float = _seconds(0.05, "pause before the second retry, doubled for each further one")
    retry_wait_s: float = _seconds(2.0, "time that a failed request waits for a worker if none is left", zero="none")
    failover_max: int = flag(
        2, "workers that may die under one request, which goes on at others", least=0, special={0: "none goes on"}
    )
    resume_window_s: float = _seconds(
        0.0,
        "time for which a stream can go on after its connection, or the router, broke (Last-Event-ID)",
        zero="none",
    )
    request_timeout_s: float = _seconds(
        1800.0, "longest time for one request in all", above=0, option="--request-timeout-secs"
    )


@dataclass(frozen=True, kw_only=True)
class RouterLogFlags(FlagSet):
    topic = "logging"

    log_level: str = flag("info", "lowest level of the log", choices=("debug", "info", "warning", "error"))
    log_format: str = flag("text", "log as text or as one JSON object per line", choices=LOG_FORMATS)
    log_requests: bool = flag(False, "log one line per generation request: its workers, times and status")
    enable_trace: bool = flag(False, "send spans to an OpenTelemetry collector (extra `otel`; OTEL_* variables apply)")
    otlp_traces_endpoint: str | None = flag(None, "OTLP/HTTP address (http://HOST:4318); implies --enable-trace")


# Dataclass fields come from the last base first, so --help starts with WorkerFlags.
@dataclass(frozen=True, kw_only=True)
class RouterConfig(
    RouterLogFlags,
    ImageFlags,
    KeyFlags,
    DiscoveryFlags,
    AutoRolesFlags,
    AdmissionFlags,
    RetryFlags,
    BreakerFlags,
    HealthFlags,
    ChoiceFlags,
    ListenFlags,
    WorkerFlags,
):
    """All flags of the router. `mixed`: unified workers and pairs."""

    @property
    def default_policy(self) -> str:
        return self.policy or (BY_CACHE if self.route == "auto" else BY_LOAD)

    @property
    def mixed(self) -> bool:
        return self.pd_disaggregation and bool(self.worker_urls or self.selector)


def check_config(config: RouterConfig) -> None:
    """Raises ConfigError."""
    for flag_name, url in _worker_urls(config):
        check_worker_url(flag_name, url)
    if not config.pd_disaggregation:
        _require(config.route == "auto", "--route", "needs --pd-disaggregation: unified workers serve whole requests")
        _require(not (config.prefill or config.decode), "--prefill/--decode", "need --pd-disaggregation")
        for name, policy in (("--prefill-policy", config.prefill_policy), ("--decode-policy", config.decode_policy)):
            _require(policy is None, name, "needs --pd-disaggregation; unified workers go by --policy")
    for _, port in config.prefill:
        _require(
            port is None or 0 < port <= MAX_PORT, "--prefill", f"bootstrap port must be 1 to {MAX_PORT}, got {port}"
        )
    _require(
        not config.resume_window_s or config.failover_max > 0,
        "--resume-window",
        "needs --failover-max above 0: a stream goes on as after the loss of a worker",
    )
    _check_discovery(config)
    _check_auto_roles(config)
    AllowedHosts(domains=config.allowed_media_domains, networks=config.allowed_media_networks)  # parses the rules


def check_worker_url(name: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        ok = parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/") and not parts.query
        _ = parts.port
    except ValueError:
        ok = False
    _require(bool(ok), name, f"{url!r} is not a worker's address; give http://HOST:PORT")


def _worker_urls(config: RouterConfig) -> list[tuple[str, str]]:
    named = [("--prefill", url) for url, _ in config.prefill] + [("--decode", url) for url in config.decode]
    named += [("--worker-urls", url) for url in config.worker_urls]
    return named + [("--encode", url) for url in config.encode]


def _check_auto_roles(config: RouterConfig) -> None:
    if config.auto_roles:
        _require(config.pd_disaggregation, "--auto-roles", "needs --pd-disaggregation: unified workers have one role")
        _require(
            config.load_poll_interval_s > 0, "--auto-roles", "goes by what workers report; set --load-poll-interval"
        )
    _require(
        config.auto_roles_leave < config.auto_roles_enter,
        "--auto-roles-leave",
        f"must be below --auto-roles-enter ({config.auto_roles_enter}), got {config.auto_roles_leave}",
    )


def _check_discovery(config: RouterConfig) -> None:
    """Require selectors of the roles in use (optional for encoders) only."""
    pairs = [("--prefill-selector", config.prefill_selector), ("--decode-selector", config.decode_selector)]
    unified = [("--selector", config.selector)]
    for name, parts in [*pairs, *unified, ("--encode-selector", config.encode_selector)]:
        _require(config.service_discovery or not parts, name, "needs --service-discovery")
        try:
            label_query(parts)
        except ValueError as err:
            raise ConfigError(f"{name}: {err}") from None
        if name == "--encode-selector" or (name == "--selector" and config.pd_disaggregation):
            continue
        if config.service_discovery and config.pd_disaggregation == (name != "--selector"):
            _require(bool(parts), name, "--service-discovery needs it: which pods? Give KEY=VALUE")
        else:
            _require(not parts, name, "is for the other mode; see --pd-disaggregation")


def label_query(parts: Sequence[str]) -> str:
    """Raises ValueError."""
    words = [word for part in parts for word in part.split()]
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals) or "=" in value or "," in word:
            raise ValueError(f"{word!r} is not KEY=VALUE")
    return ",".join(f"{key}={value}" for key, value in dict(word.split("=", 1) for word in words).items())


def _require(ok: bool, name: str, message: str) -> None:
    if not ok:
        raise ConfigError(f"{name}: {message}")
