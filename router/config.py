"""The router's flags. Frozen; every field is one `--flag` (deploy/flags.py derives them), named as SGLang's router names it.

Knows values only: no sockets, no files. `check_config` is the one place that refuses a value.
"""

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from router.selectors import Selector
from service.flags import ConfigError
from service.telemetry.logs import FORMATS as LOG_FORMATS

POLICIES = ("least_load", "cache_aware", "power_of_two", "round_robin", "random", "consistent_hashing")
_MAY_BE_ZERO = (
    "max_concurrent_requests_per_client",
    "queue_size",
    "queue_timeout_secs",
    "slo_ttft_ms",
    "slo_itl_ms",
    "hedge_after",
    "cb_timeout_duration_secs",
    "cb_window_duration_secs",
    "retry_max",
    "retry_backoff_s",
    "retry_wait_s",
    "load_poll_interval_s",
    "dead_worker_timeout_s",
    "health_silence_s",
    "drain_timeout",
    "trace_ring",
    "shutdown_timeout_s",
)


def flag(default: Any, help: str, *, choices: tuple[str, ...] | None = None, cli: str | None = None) -> Any:
    """A field with the text of its flag. `cli="special"`: the command line parses it by hand (several values)."""
    return field(default=default, metadata={"help": help, "choices": choices, "cli": cli})


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """One router in front of prefill and decode workers, or (without --pd-disaggregation) of unified workers."""

    pd_disaggregation: bool = flag(False, "send each request to a prefill and a decode worker (else: --worker-urls)")
    prefill: tuple[tuple[str, int | None], ...] = flag(
        (),
        "URL [BOOTSTRAP_PORT] of a prefill worker; repeatable; without a port it is read from the worker",
        cli="special",
    )
    decode: tuple[str, ...] = flag((), "URL of a decode worker; repeatable", cli="special")
    worker_urls: tuple[str, ...] = flag((), "URLs of unified workers (without --pd-disaggregation)", cli="special")
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(30080, "port to listen on; 0: a free one")
    workers: int = flag(1, "router processes that share the port, the pool and one view of the load")
    policy: str = flag("least_load", "how workers are chosen (docs/router.md)", choices=POLICIES)
    prefill_policy: str | None = flag(None, "how prefill workers are chosen; default: --policy", choices=POLICIES)
    decode_policy: str | None = flag(None, "how decode workers are chosen; default: --policy", choices=POLICIES)
    cache_threshold: float = flag(0.3, "cache_aware: a match shorter than this share of the prompt counts as none")
    balance_abs_threshold: int = flag(
        64, "cache_aware: goes by load alone while the longest queue is by more than so many requests the longest,"
    )
    balance_rel_threshold: float = flag(1.5, "... and more than so many times as long as the shortest")
    max_tree_size: int = flag(
        1 << 26, "cache_aware: bytes of prompts (token ids: 4 each) that are remembered per worker, the latest"
    )
    disable_kv_events: bool = flag(
        False, "cache_aware: do not listen to the KV events of workers that publish them (--kv-events-config)"
    )
    health_check_interval_s: float = flag(1.0, "seconds between health checks of a worker")
    health_check_timeout_s: float = flag(5.0, "seconds a health check may take")
    health_silence_s: float = flag(
        1.5, "a worker that says nothing for so long while it is asked gets requests only where no other is; 0: never"
    )
    health_failure_threshold: int = flag(2, "failed checks in a row before a worker leaves the pool")
    health_success_threshold: int = flag(1, "good checks in a row before it comes back")
    load_poll_interval_s: float = flag(
        1.0, "seconds between reads of a worker's load; 0: trust the router's own counts"
    )
    retry_max: int = flag(3, "other attempts for one request while nothing was sent to the client; 0: none")
    retry_backoff_s: float = flag(0.05, "pause before the second retry, doubled each time (the first is immediate)")
    retry_wait_s: float = flag(
        2.0, "seconds a request whose workers failed waits for one to be alive again, where no other is; 0: none"
    )
    hedge_after: float = flag(
        0.0,
        "send a stream of which no byte came after so many milliseconds to a second pair too; the first that answers wins; "
        "0: never. X-Tandem-Hedge-After-Ms says it for one request",
    )
    hedge_budget: float = flag(0.05, "share of the requests that may be hedged")
    cb_failure_threshold: int = flag(
        10, "faults of a worker in a row that open its circuit: it is left out for a while"
    )
    cb_success_threshold: int = flag(3, "answers begun that close the circuit again; as many may try it at a time")
    cb_timeout_duration_secs: float = flag(60.0, "seconds an open circuit stays open before requests try the worker")
    cb_window_duration_secs: float = flag(120.0, "seconds that a fault counts towards opening the circuit")
    disable_circuit_breaker: bool = flag(False, "faults of requests never leave a worker out; health checks alone do")
    connect_timeout_s: float = flag(5.0, "seconds a connection to a worker may take")
    dead_worker_timeout_s: float = flag(
        30.0,
        "a request ends (or moves) when its worker sent nothing and was well in no health check for so long; 0: it waits on",
    )
    request_timeout_s: float = flag(1800.0, "seconds one request may take in all")
    max_concurrent_requests: int = flag(
        16384, "requests that are served at a time; one more waits (--queue-size) or is answered 429"
    )
    max_concurrent_requests_per_client: int = flag(
        0, "requests of one API key (without keys: one address) that are served at a time; 0: no limit"
    )
    queue_size: int = flag(
        0,
        "requests that wait in each router process while a limit is reached; higher `priority` goes first; 0: none does",
    )
    queue_timeout_secs: float = flag(60.0, "seconds a request waits so before it is answered 429")
    slo_ttft_ms: float = flag(
        0.0, "refuse (429) a request whose first token would come later than this, as foretold; X-SLO-TTFT-ms; 0: never"
    )
    slo_itl_ms: float = flag(
        0.0,
        "refuse (429) a request whose tokens would come further apart than this, as foretold; X-SLO-ITL-ms; 0: never",
    )
    auto_roles: bool = flag(
        False, "move workers between the prefill and the decode pool as their load asks for (docs/router.md)"
    )
    auto_roles_interval: float = flag(1.0, "auto roles: seconds between two looks at the pools")
    auto_roles_min_prefill: int = flag(1, "auto roles: prefill workers that each model keeps")
    auto_roles_min_decode: int = flag(1, "auto roles: decode workers that each model keeps")
    auto_roles_enter: float = flag(
        0.9, "auto roles: a pool is short when its work reaches this share of what it can bear,"
    )
    auto_roles_leave: float = flag(0.7, "... and no longer when it is below this")
    auto_roles_sustain: float = flag(
        15.0, "auto roles: seconds that a pool must be short before it gets a worker, and no less than a move takes"
    )
    auto_roles_cooldown: float = flag(
        60.0, "auto roles: seconds after a move before one in the other direction, or after a failed one before any"
    )
    auto_roles_switch_time: float = flag(
        30.0, "auto roles: seconds that a move is taken to last (drain and start) before one was measured"
    )
    auto_roles_ttft_ms: float = flag(2000.0, "auto roles: prompts may wait so long before prefill is called short")
    auto_roles_itl_ms: float = flag(
        0.0, "auto roles: tokens may come so far apart before decode is called short; 0: by KV and requests alone"
    )
    drain_timeout: float = flag(
        30.0, "seconds that running requests get after SIGTERM; then they are handed back (503); a second signal: none"
    )
    shutdown_timeout_s: float = flag(3.0, "seconds that last answers get to leave when the router ends")
    max_body_bytes: int = flag(64 << 20, "longest request body")
    header_timeout_s: float = flag(10.0, "seconds a client's connection may take to send the head of a request")
    body_timeout_s: float = flag(60.0, "seconds a request's body may take to come")
    api_key: str | None = flag(None, "clients must send this as 'Authorization: Bearer KEY'")
    api_key_file: str | None = flag(None, "file of such keys, one a line; read anew when it changes, and on SIGHUP")
    admin_api_key: str | None = flag(
        None, "key for what changes workers or the pool (weights, cache, pause, /workers); default: the API keys do"
    )
    admin_api_key_file: str | None = flag(None, "file of admin keys, one a line; read anew as the other")
    allow_insecure: bool = flag(False, "listen off loopback without API keys: anybody may do anything")
    allowed_hosts: tuple[str, ...] = flag(
        (),
        "names, besides addresses and localhost, by which clients may reach a router on loopback without keys; *: any",
    )
    allowed_origins: tuple[str, ...] = flag(
        (), "sites, as https://HOST[:PORT], whose pages may send requests that change something; *: any"
    )
    worker_api_key: str | None = flag(
        None, "key the router sends to workers; default: the client's Authorization header is passed on"
    )
    worker_api_key_file: str | None = flag(None, "file with that key in its first line; read anew when it changes")
    worker_admin_api_key: str | None = flag(
        None, "key for calls that workers keep for their admin; default: the caller's Authorization header is passed on"
    )
    worker_admin_api_key_file: str | None = flag(None, "file with that key in its first line")
    cluster_secret_file: str | None = flag(
        None, "file with the secret that workers share: the router vouches to decode for the bootstrap servers it names"
    )
    rate_limit_requests_per_second: float = flag(
        0.0,
        "requests a second that one API key (without keys: one address) may make; more are answered 429; 0: no limit",
    )
    rate_limit_burst: int = flag(0, "requests that may come at once under the rate limit; 0: those of two seconds")
    log_level: str = flag("info", "log level", choices=("debug", "info", "warning", "error"))
    log_format: str = flag("text", "lines for people, or one JSON object each", choices=LOG_FORMATS)
    log_requests: bool = flag(False, "one line for each generation request: its workers, times and status")
    enable_trace: bool = flag(False, "send spans to an OpenTelemetry collector (extra `otel`; OTEL_* variables hold)")
    otlp_traces_endpoint: str | None = flag(
        None, "OTLP/HTTP address of the collector, as http://HOST:4318; says --enable-trace"
    )
    trace_ring: int = flag(512, "requests whose times are kept for `tandem trace`; 0: none")
    ready_file: str | None = flag(None, "write JSON here once the router listens")
    service_discovery: bool = flag(
        False,
        "workers are the pods that the selectors choose, as they come and go (Kubernetes; needs tandem-serve[k8s])",
    )
    selector: tuple[str, ...] = flag((), "KEY=VALUE labels of unified workers' pods (without --pd-disaggregation)")
    prefill_selector: tuple[str, ...] = flag((), "KEY=VALUE labels of prefill workers' pods")
    decode_selector: tuple[str, ...] = flag((), "KEY=VALUE labels of decode workers' pods")
    service_discovery_port: int = flag(80, "port that workers listen on in their pods")
    service_discovery_namespace: str | None = flag(
        None, "namespace of the pods; default: all (the service account then needs a ClusterRole)"
    )
    prefill_bootstrap_port_annotation: str = flag(
        "sglang.ai/bootstrap-port",
        "annotation of a prefill pod that has its bootstrap port; a pod without it is asked for the port",
    )


def check_config(config: RouterConfig) -> None:
    """Raise `ConfigError` for the first flag that cannot be honoured. Workers may also be added at run time."""
    for flag_name, url in _worker_urls(config):
        check_worker_url(flag_name, url)
    if config.pd_disaggregation:
        _require(not config.worker_urls, "--worker-urls", "is for unified workers; leave out --pd-disaggregation")
    else:
        _require(not (config.prefill or config.decode), "--prefill/--decode", "need --pd-disaggregation")
    for _, port in config.prefill:
        _require(port is None or 0 < port < 65536, "--prefill", f"bootstrap port must be 1 to 65535, got {port}")
    _check_numbers(config)
    _check_discovery(config)
    _check_auto_roles(config)
    _require(
        config.rate_limit_requests_per_second >= 0,
        "--rate-limit-requests-per-second",
        "must be at least 0; 0: no limit",
    )
    _require(config.rate_limit_burst >= 0, "--rate-limit-burst", "must be at least 0")


def check_worker_url(name: str, url: str) -> None:
    """Raise `ConfigError` unless `url` is http(s)://HOST[:PORT] with nothing behind it."""
    try:
        parts = urlsplit(url)
        ok = parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/") and not parts.query
        _ = parts.port
    except ValueError:
        ok = False
    _require(bool(ok), name, f"{url!r} is not a worker's address; give http://HOST:PORT")


def _worker_urls(config: RouterConfig) -> list[tuple[str, str]]:
    named = [("--prefill", url) for url, _ in config.prefill] + [("--decode", url) for url in config.decode]
    return named + [("--worker-urls", url) for url in config.worker_urls]


def _check_numbers(config: RouterConfig) -> None:
    _require(0 <= config.port < 65536, "--port", f"must be 0 to 65535, got {config.port}")
    for name in (
        "health_check_interval_s",
        "health_check_timeout_s",
        "connect_timeout_s",
        "request_timeout_s",
        "header_timeout_s",
        "body_timeout_s",
    ):
        value = getattr(config, name)
        _require(value > 0, f"--{name.replace('_', '-')}", f"must be greater than 0, got {value}")
    for name in (
        "workers",
        "health_failure_threshold",
        "health_success_threshold",
        "max_concurrent_requests",
        "max_body_bytes",
        "cb_failure_threshold",
        "cb_success_threshold",
    ):
        value = getattr(config, name)
        _require(value >= 1, f"--{name.replace('_', '-')}", f"must be at least 1, got {value}")
    for name in _MAY_BE_ZERO:
        value = getattr(config, name)
        _require(value >= 0, f"--{name.replace('_', '-')}", f"must be at least 0, got {value}")
    _require(0 < config.hedge_budget <= 1, "--hedge-budget", f"must be above 0, at most 1, got {config.hedge_budget}")
    _check_policies(config)


def _check_policies(config: RouterConfig) -> None:
    for name in ("policy", "prefill_policy", "decode_policy"):
        value = getattr(config, name)
        known = value in POLICIES or (value is None and name != "policy")
        _require(known, f"--{name.replace('_', '-')}", f"must be one of {', '.join(POLICIES)}, got {value!r}")
        paired = value is None or name == "policy" or config.pd_disaggregation
        _require(paired, f"--{name.replace('_', '-')}", "needs --pd-disaggregation; unified workers go by --policy")
    _require(0 <= config.cache_threshold <= 1, "--cache-threshold", f"must be 0 to 1, got {config.cache_threshold}")
    _require(config.balance_abs_threshold >= 0, "--balance-abs-threshold", "must be at least 0")
    _require(config.balance_rel_threshold >= 1, "--balance-rel-threshold", "must be at least 1")
    _require(config.max_tree_size >= 1, "--max-tree-size", "must be at least 1")


def _check_auto_roles(config: RouterConfig) -> None:
    if config.auto_roles:
        _require(config.pd_disaggregation, "--auto-roles", "needs --pd-disaggregation: unified workers have one role")
        _require(
            config.load_poll_interval_s > 0, "--auto-roles", "goes by what workers report; set --load-poll-interval-s"
        )
    for name in ("auto_roles_interval", "auto_roles_ttft_ms", "auto_roles_leave"):
        value = getattr(config, name)
        _require(value > 0, f"--{name.replace('_', '-')}", f"must be greater than 0, got {value}")
    for name in ("auto_roles_min_prefill", "auto_roles_min_decode"):
        value = getattr(config, name)
        _require(
            value >= 1, f"--{name.replace('_', '-')}", f"must be at least 1, got {value}: an empty pool serves nobody"
        )
    for name in ("auto_roles_sustain", "auto_roles_cooldown", "auto_roles_switch_time", "auto_roles_itl_ms"):
        value = getattr(config, name)
        _require(value >= 0, f"--{name.replace('_', '-')}", f"must be at least 0, got {value}")
    _require(
        config.auto_roles_leave < config.auto_roles_enter,
        "--auto-roles-leave",
        f"must be below --auto-roles-enter ({config.auto_roles_enter}), got {config.auto_roles_leave}",
    )


def _check_discovery(config: RouterConfig) -> None:
    """Each role that the router needs has a selector, and the other ones have none."""
    pairs = [("--prefill-selector", config.prefill_selector), ("--decode-selector", config.decode_selector)]
    unified = [("--selector", config.selector)]
    needed, other = (pairs, unified) if config.pd_disaggregation else (unified, pairs)
    for name, parts in pairs + unified:
        _require(config.service_discovery or not parts, name, "needs --service-discovery")
        try:
            Selector(parts)
        except ValueError as err:
            raise ConfigError(f"{name}: {err}") from None
    if config.service_discovery:
        for name, parts in needed:
            _require(bool(parts), name, "--service-discovery needs it: which pods? Give KEY=VALUE")
        for name, parts in other:
            _require(not parts, name, "is for the other mode; see --pd-disaggregation")
        port = config.service_discovery_port
        _require(0 < port < 65536, "--service-discovery-port", f"must be 1 to 65535, got {port}")


def _require(ok: bool, name: str, message: str) -> None:
    if not ok:
        raise ConfigError(f"{name}: {message}")
