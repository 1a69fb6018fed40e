"""`tandem router`: the router by its flags."""

import argparse
from collections.abc import Sequence

from deploy.flags import Parser, add_flags, config_from
from deploy.foreign.router import ROUTER
from router.config import RouterConfig


def run(argv: Sequence[str]) -> int:
    config = config_of(build_parser().parse_strict(argv))
    from router.server import serve  # not before the flags are right

    serve(config, on_ready=lambda url: print(f"router listens on {url}", flush=True))
    return 0


# Groups of help in their order, and what `--help` shows.
TOPICS = ("workers", "server", "routing", "keys", "admission", "retries")
COMMON = (
    *("pd_disaggregation", "prefill", "decode", "worker_urls", "route"),
    *("host", "port", "workers", "policy"),
    *("api_key", "api_key_file", "worker_api_key"),
    *("max_concurrent_requests", "queue_size", "rate_limit_requests_per_second"),
    *("retry_max", "request_timeout_s", "service_discovery", "log_level", "log_requests"),
)


def build_parser() -> Parser:
    parser = Parser(
        prog="tandem router",
        foreign=ROUTER,
        topics=TOPICS,
        common=COMMON,
        description="Route requests to pairs of prefill and decode workers (or to unified workers).",
    )
    parser.add(
        "workers",
        "--prefill",
        action="append",
        nargs="+",
        metavar=("URL", "BOOTSTRAP_PORT"),
        default=[],
        help="a prefill worker; repeatable; default BOOTSTRAP_PORT: as the worker reports",
    )
    parser.add("workers", "--decode", action="append", metavar="URL", default=[], help="a decode worker; repeatable")
    parser.add(
        "workers",
        "--encode",
        action="append",
        metavar="URL",
        default=[],
        help="an encoder worker, which computes images for prefill and unified workers; repeatable",
    )
    parser.add(
        "workers",
        "--worker-urls",
        nargs="+",
        metavar="URL",
        default=[],
        help="unified workers (alone, or beside pairs)",
    )
    add_flags(parser, RouterConfig, title="router")
    return parser


def config_of(args: argparse.Namespace) -> RouterConfig:
    """Prefill or decode workers or selectors imply --pd-disaggregation."""
    pairs = (args.prefill, args.decode, args.prefill_selector, args.decode_selector)
    args.pd_disaggregation = args.pd_disaggregation or any(pairs)
    return config_from(
        args,
        RouterConfig,
        prefill=tuple(_prefill(words) for words in args.prefill),
        decode=tuple(args.decode),
        worker_urls=tuple(args.worker_urls),
        encode=tuple(args.encode),
    )


def _prefill(words: list[str]) -> tuple[str, int | None]:
    if len(words) == 1:
        return words[0], None
    if len(words) == 2 and words[1].lower() == "none":
        return words[0], None
    if len(words) == 2 and words[1].isdigit():
        return words[0], int(words[1])
    build_parser().error(f"--prefill: takes URL [BOOTSTRAP_PORT], got {' '.join(words)!r}")
