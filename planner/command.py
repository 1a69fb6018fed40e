"""`tandem plan`: the smallest cluster for a workload and SLO, by simulation."""

from collections.abc import Sequence
from pathlib import Path

from deploy.flags import Parser, add_flags, config_from
from planner.config import PlanConfig, check_plan
from service.extras import require
from service.flags import ConfigError

# What `--help` shows.
COMMON = (
    *("model_path", "gpu", "gpu_profile", "transfer_gb_s"),
    *("trace", "input_len", "output_len", "shared_prefix_len", "num_requests"),
    *("slo_ttft_s", "slo_tpot_s", "slo_itl_s", "slo_percent"),
    *("layouts", "num_workers", "request_rate", "tp_size", "total_rate"),
    *("output", "plot"),
)


def run(argv: Sequence[str]) -> int:
    """0 if a layout meets the SLO (or with --rates)."""
    config = config_from(build_parser().parse_strict(argv), PlanConfig)
    check_plan(config)
    require("plan")
    files = {
        "--output": config.output,
        "--plot": config.plot,
        "--save-profile": config.save_profile,
        "--log-file": config.log_file,
    }
    for flag, path in files.items():
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{flag}: {Path(path).parent} is no directory; create it first")
    return _plan(config)


def build_parser() -> Parser:
    parser = Parser(
        prog="tandem plan",
        common=COMMON,
        description="Find the smallest cluster for a rate (--request-rate), or the one with the best goodput per GPU: runs "
        "the real scheduler under virtual time over layouts of prefill and decode workers and over unified ones, with a "
        "cost model in place of the GPU. See docs/planning.md.",
    )
    add_flags(parser, PlanConfig, title="run")
    return parser


def _plan(config: PlanConfig) -> int:
    from planner.report import check_plot, draw, report_json, report_text, sizes_text
    from planner.run import run_plan
    from planner.smallest import find_smallest, smallest
    from planner.study import study_of, with_local_models

    if config.plot:
        check_plot(config.plot)
    config = with_local_models(config)
    study = study_of(config)
    if config.request_rate is None:
        sizes, outcomes = [], run_plan(study)
        print(report_text(outcomes, study))
    else:
        sizes = find_smallest(study, config.request_rate)
        outcomes = [one.outcome for one in sizes]
        print(sizes_text(sizes, study, config.request_rate))
    if config.output:
        Path(config.output).write_bytes(report_json(outcomes, study, sizes))
    if config.plot:
        title = f"{study.model} on {config.gpu or 'measured hardware'}"
        draw(outcomes, share=study.slo.share, title=title, path=config.plot)
    if config.request_rate is not None:
        return 0 if smallest(sizes, study) else 1
    return 0 if config.rates or any(outcome.best for outcome in outcomes) else 1
