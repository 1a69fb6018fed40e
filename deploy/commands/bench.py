"""`tandem bench`: load on a server, with conditions, table and files."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from deploy.bench.config import BenchConfig, ReportFlags, SamplingFlags, TargetFlags, WorkloadFlags, check_bench
from deploy.flags import Parser, add_flags, config_from, flags_of
from deploy.foreign.bench import BENCH

# What `--help` shows.
COMMON = (
    *("url", "compare", "api", "model", "tokenizer", "api_key"),
    *("num_requests", "request_rate", "concurrency", "dataset_name", "dataset_path"),
    *("input_len", "output_len", "seed", "ignore_eos", "temperature"),
    *("goodput", "metric_percentiles", "output", "save_result"),
)


def run(argv: Sequence[str]) -> int:
    """0 if every request was answered."""
    config = config_from(build_parser().parse_strict(argv), BenchConfig)
    check_bench(config)
    import uvloop

    return int(uvloop.run(_bench(config)))


def build_parser() -> Parser:
    parser = Parser(
        prog="tandem bench",
        foreign=BENCH,
        common=COMMON,
        description="Put load on an OpenAI-compatible server, or on SGLang's /generate: closed loop (--concurrency), "
        "Poisson arrivals (--request-rate) or a trace (--trace); prompts are random, or of a file (--dataset-name). "
        "Prints conditions, throughput, latencies and goodput, and writes them to files. Flags of `vllm bench serve` "
        "and `sglang.bench_serving` work.",
    )
    shown = set[str]()
    for title, flags in (
        ("server", TargetFlags),
        ("load", WorkloadFlags),
        ("sampling", SamplingFlags),
        ("report", ReportFlags),
        ("run", BenchConfig),
    ):
        add_flags(parser, flags, title=title, skip=shown)
        shown |= {flag.name for flag in flags_of(flags)}
    return parser


async def _bench(config: BenchConfig) -> int:
    from deploy.bench.results import save_results
    from deploy.bench.run import conditions_text, prepare, print_report, result_json, run

    prepared = await prepare(config)
    print(conditions_text(config, prepared), flush=True)
    measured = await run(config, prepared)
    print_report(config, measured)
    if config.output:
        Path(config.output).write_bytes(result_json(config, prepared, measured))
    for path in save_results(config, prepared.servers[0].model, measured[0], now=datetime.now()):
        print(f"\nwritten to {path}")
    return 0 if all(record.error is None for one in measured for record in one.records) else 1
