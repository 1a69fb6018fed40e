"""`tandem bench`: load on a server, with table and JSON."""

from collections.abc import Sequence
from pathlib import Path

from deploy.bench.config import BenchConfig, check_bench
from deploy.flags import Parser, add_flags, config_from
from service.flags import ConfigError


def run(argv: Sequence[str]) -> int:
    """Measure; return 0 if every request was answered."""
    config = config_from(build_parser().parse_strict(argv), BenchConfig)
    check_bench(config)
    if config.output and not Path(config.output).absolute().parent.is_dir():
        raise ConfigError(f"--output: {Path(config.output).parent} is no directory; create it first")
    import uvloop

    return int(uvloop.run(_bench(config)))


def build_parser() -> Parser:
    parser = Parser(
        prog="tandem bench",
        description="Put load on an OpenAI-compatible server: closed loop (--concurrency), Poisson arrivals "
        "(--request-rate) or a trace (--trace). Prints throughput and latencies, and writes them as JSON (--output).",
    )
    add_flags(parser, BenchConfig, title="bench")
    return parser


async def _bench(config: BenchConfig) -> int:
    from deploy.bench.run import measure, print_report, result_json

    measured = await measure(config)
    summaries = print_report(config.urls, measured)
    if config.output:
        Path(config.output).write_bytes(result_json(config, measured, summaries))
    return 0 if all(summary.completed == summary.requests for summary in summaries) else 1
