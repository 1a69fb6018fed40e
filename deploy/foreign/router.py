"""Flags of SGLang's router (SMG) and vLLM's that `tandem router` lacks."""

from deploy.foreign.translate import Entry, Fixed, ForeignFlags, Ignored, Missing, Renamed, Values, each
from deploy.foreign.worker import TLS

ONE, MANY = Values.ONE, Values.MANY
AT_WORKERS = "workers read texts and calls; give it to `tandem serve`"
ANY_TIME = "workers may come at any time; until then requests wait for --retry-wait"
MIN_USED = "the least recently used prefixes go, by --max-tree-size"
BACKOFF = "give --retry-backoff, in seconds; it doubles with each retry"
IN_MEMORY = "answers of /v1/responses are kept in memory"
ROUTES = "unified workers beside pairs need no flag (--worker-urls), and prices decide (--route, X-SLO-TTFT-ms); leave it out"
KEYS = "give --api-key-file and --admin-api-key-file"

_FLAGS: dict[str, Entry] = {
    "--max-payload-size": Renamed(("--max-body-bytes",), ONE),
    "--shutdown-grace-period-secs": Renamed(("--drain-timeout",), ONE),
    "--cors-allowed-origins": Renamed(("--allowed-origins",), MANY),
    "--disable-retries": Renamed(("--retry-max=0",)),
    "--vllm-pd-disaggregation": Renamed(("--pd-disaggregation",)),
    **each(
        Ignored(AT_WORKERS, ONE),
        """--model-path --tokenizer-path --chat-template --reasoning-parser --tool-call-parser
        --tokenizer-cache-l0-max-entries --tokenizer-cache-l1-max-memory""",
    ),
    **each(Ignored(ANY_TIME, ONE), "--worker-startup-timeout-secs --worker-startup-check-interval"),
    **each(Ignored(MIN_USED, ONE), "--eviction-interval-secs --max-idle-secs"),
    "--bucket-adjust-interval-secs": Ignored("it belongs to the policy `bucket`", ONE),
    "--enable-igw": Ignored("requests always go to workers of the model they name"),
    "--prefix-fetch": Ignored("workers say whether they exchange prefixes"),
    **each(Missing(ROUTES), "--mixed --mixed-ttft --mixed-itl"),
    "--prefix-copy-bytes-per-second": Missing("prefixes are fetched where a request needs them; leave it out"),
    "--mini-lb": Ignored("there is one router"),
    **each(Ignored(AT_WORKERS), "--tokenizer-cache-enable-l0 --tokenizer-cache-enable-l1"),
    "--backend": Fixed(("sglang",), "workers are Tandem's or SGLang's"),
    "--history-backend": Fixed(("memory",), IN_MEMORY),
    "--health-check-endpoint": Fixed(("/health",), "workers are asked at /health"),
    "--retry-backoff-multiplier": Fixed(("2", "2.0"), BACKOFF),
    "--intra-node-data-parallel-size": Fixed(("1",), "a worker spreads its requests over its DP ranks itself"),
    **each(Missing(BACKOFF), "--retry-initial-backoff-ms --retry-max-backoff-ms --retry-jitter-factor"),
    "--retry-max-retries": Missing("give --retry-max, which does not count the first try"),
    "--rate-limit-tokens-per-second": Missing("give --rate-limit-requests-per-second and --rate-limit-burst"),
    "--disable-health-check": Missing(
        "workers that do not answer are found by health checks; see --health-check-interval-secs"
    ),
    "--assignment-mode": Missing("it belongs to the policy `manual`; consistent_hashing keeps sessions together"),
    "--dp-aware": Missing("a worker spreads its requests over its DP ranks itself (--load-balance-method)"),
    "--log-dir": Missing("the log goes to stderr; redirect it"),
    "--prometheus-port": Missing("/metrics is at --port"),
    "--prometheus-host": Missing("/metrics is at --host"),
    "--prometheus-duration-buckets": Missing("buckets are fixed (docs/observability.md)"),
    "--request-id-headers": Missing("X-Request-Id is read and passed on"),
    "--mcp-config-path": Missing("the router calls no tools"),
    **each(Missing(TLS), "--client-cert-path --client-key-path --ca-cert-paths"),
    "--control-plane-api-keys": Missing(KEYS),
    "--control-plane-audit-enabled": Missing("--log-requests and the log name each call"),
}
ROUTER = ForeignFlags(
    flags=_FLAGS,
    families={
        "--tls-": TLS,
        "--jwt-": KEYS,
        **each(IN_MEMORY, "--oracle- --postgres- --redis-"),
    },
)
