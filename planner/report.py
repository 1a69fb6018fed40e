"""Results of a plan as text and JSON."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from deploy.bench.environment import describe
from deploy.bench.stats import table
from planner.run import Outcome
from planner.smallest import SizeResult, smallest
from planner.study import LONG, Study
from service.extras import missing
from service.flags import ConfigError

STEP_TOKENS = "tokens a step"  # with speculation
HEADER = ("layout", "req/s/GPU", "good", "TTFT ms", "TPOT ms", "cached", "busy")


def report_text(outcomes: Sequence[Outcome], study: Study) -> str:
    """Best rates, or all --rates, and the recommendation."""
    lines = [_about(study, outcomes), ""]
    shown: list[tuple[Outcome, Any]]
    if study.config.rates:
        shown = [(o, p) for o in outcomes for p in o.points]
    else:
        shown = [(o, o.best) for o in sorted(outcomes, key=lambda o: -o.rate)]
    rows = [[o.layout.name, *_cells(p)] for o, p in shown]
    percent = f"p{100 * study.slo.share:g}"
    header = [f"{h.removesuffix(' ms')} {percent}, ms" if h.endswith(" ms") else h for h in HEADER]
    if study.config.speculative_algorithm is not None:
        header.append(STEP_TOKENS)
        per_step = [None if point is None else point.step_tokens for _, point in shown]
        rows = [[*row, "" if n is None else f"{n:.2f}"] for row, n in zip(rows, per_step, strict=True)]
    lines.append(table(header, rows))
    return "\n".join([*lines, "", *_advice(outcomes, study.config.total_rate), *_doubts(outcomes, study)])


def sizes_text(found: Sequence[SizeResult], study: Study, rate: float) -> str:
    """Write the smallest cluster for `rate` per second, then the other sizes."""
    percent = f"p{100 * study.slo.share:g}"
    header = ["layout", "GPUs", "good", f"TTFT {percent}, ms", f"TPOT {percent}, ms", "holds up to, req/s", "busy"]
    best = smallest(found, study)
    rows = [_size_cells(one, study) for one in found if best is None or one.layout.num_gpus >= best.layout.num_gpus]
    outcomes = [one.outcome for one in found]
    lines = [_about(study, outcomes), "", *_size_advice(found, best, rate), "", table(header, rows)]
    return "\n".join([*lines, *_doubts(outcomes, study, at={one.outcome: rate for one in found})])


def _size_cells(one: SizeResult, study: Study) -> list[str]:
    _, good, ttft, tpot, _, busy = _cells(one.point)
    more = "more than " if one.max_per_s >= study.max_verified_per_s else ""
    highest = f"{more}{one.max_per_s:.3g}" if one.max_per_s else "less"
    return [one.layout.name, str(one.layout.num_gpus), good, ttft, tpot, highest, busy]


def _size_advice(found: Sequence[SizeResult], best: SizeResult | None, rate: float) -> list[str]:
    if best is None:
        last = max(found, key=lambda one: one.layout.num_gpus)
        return [
            f"No cluster of up to {last.layout.num_gpus} GPUs serves {rate:g} requests a second within the limits: the best "
            f"of {last.layout.num_gpus}, {last.layout.name}, keeps {100 * last.point.good_share:.0f} %. Raise --num-workers, "
            "relax --slo-ttft or --slo-tpot, or take a faster GPU."
        ]
    size = best.layout.num_gpus
    lines = [f"smallest for {rate:g} requests a second: {best.layout.name}, {size} GPU{'s' * (size > 1)}"]
    smaller = [one for one in found if one.layout.num_gpus < size]
    if smaller:
        nearest = max(smaller, key=lambda one: one.layout.num_gpus)
        share = 100 * nearest.point.good_share
        lines.append(f"one size smaller, {nearest.layout.name} keeps the limits for {share:.0f} % of the requests")
    return lines


def report_json(outcomes: Sequence[Outcome], study: Study, sizes: Sequence[SizeResult] = ()) -> bytes:
    found: dict[str, Any] = {
        "environment": describe(),
        "config": study.config,
        "hardware": study.hardware.text,
        "assumed": study.hardware.assumed,
        "step_time": study.hardware.step_times,
        "layouts": [
            {
                "layout": o.layout.name,
                "workers": o.layout.num_workers,
                "gpus": o.layout.num_gpus,
                "kv_tokens": study.kv_tokens(o.layout),
                "best": o.best,
                "points": o.points,
            }
            for o in outcomes
        ],
    }
    if sizes:
        found["sizes"] = [
            {"layout": one.layout.name, "gpus": one.layout.num_gpus, "point": one.point, "max_per_s": one.max_per_s}
            for one in sizes
        ]
    return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"


def gpus_for(outcome: Outcome, total_rate: float) -> tuple[int, int]:
    copies = math.ceil(total_rate / (outcome.rate * outcome.layout.num_gpus))
    return copies, copies * outcome.layout.num_gpus


def _doubts(outcomes: Sequence[Outcome], study: Study, *, at: Mapping[Outcome, float] | None = None) -> list[str]:
    """Warn about oversized requests and short runs, which measure queues. `at`: rates of the whole
    instead of the best ones.
    """
    size = len(study.requests)
    long = [
        f"warning: {num} requests need more KV than a worker of {o.layout.name} has; they fail there"
        for o in {outcome.layout.tp: outcome for outcome in outcomes}.values()
        if (num := sum(a.input_len + a.output_len > study.kv_tokens(o.layout) for a in study.requests))
    ]
    seconds = {o: size / (at[o] if at else o.rate * o.layout.num_gpus) for o in outcomes if o.best}
    short = [o for o, lasted_s in seconds.items() if lasted_s < LONG * study.slo.ttft_s]
    if not short:
        return long
    need = max(math.ceil(size * LONG * study.slo.ttft_s / seconds[o]) for o in short)
    names = ", ".join(o.layout.name for o in short)
    return [
        *long,
        f"warning: at the {'wanted' if at else 'best'} rate of {names} all {size} requests came within {LONG} x the TTFT "
        f"limit, so it may be overstated; use --num-requests {need}",
    ]


def _about(study: Study, outcomes: Sequence[Outcome]) -> str:
    size = len(study.requests)
    prompt = sum(a.input_len for a in study.requests) / size
    output = sum(a.output_len for a in study.requests) / size
    slo = study.slo
    assumed = f"assumed, not measured: {study.hardware.assumed}\n" if study.hardware.assumed else ""
    itl = "" if slo.itl_s is None else f", ITL {1000 * slo.itl_s:g} ms"
    return (
        f"{study.hardware.text}; KV a worker: {_capacities(study, outcomes)}{_drafts(study)}\n{assumed}"
        f"{size} requests, {prompt:,.0f} tokens in, {output:,.0f} out on average; good: TTFT {1000 * slo.ttft_s:g} ms, "
        f"TPOT {1000 * slo.tpot_s:g} ms{itl}, for {100 * slo.share:g} % of them"
    )


def _drafts(study: Study) -> str:
    algorithm, rate = study.config.speculative_algorithm, study.hardware.accept_rate
    if algorithm is None or rate is None:
        return ""
    most = max(one.most for one in study.speculation.values() if one is not None)
    return f"; {algorithm} drafts at most {most} tokens, {100 * rate:.0f} % right"


def _capacities(study: Study, outcomes: Sequence[Outcome]) -> str:
    found = {o.layout.tp: study.kv_tokens(o.layout) for o in outcomes}
    if list(found) == [1]:
        return f"{found[1]:,} tokens"
    return ", ".join(f"{tokens:,} tokens on {tp} GPU{'s' * (tp > 1)}" for tp, tokens in found.items())


def _cells(point: Any) -> list[str]:
    if point is None:
        return ["0", *[""] * (len(HEADER) - 2)]
    busy = ", ".join(f"{role} {100 * share:.0f} %" for role, share in point.busy.items())
    return [
        f"{point.rate:.3g}",
        f"{100 * point.good_share:.0f} %",
        _ms(point.ttft_s),
        _ms(point.tpot_s),
        f"{100 * point.cached_share:.0f} %",
        busy,
    ]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.0f}"


def _advice(outcomes: Sequence[Outcome], total_rate: float | None) -> list[str]:
    best = max(outcomes, key=lambda o: o.rate)
    if best.best is None:
        return [
            "No layout keeps the limits at any rate that was tried: relax --slo-ttft or --slo-tpot, or take a faster GPU."
        ]
    lines = [f"best: {best.layout.name}, {best.rate:.3g} requests a second and GPU within the limits"]
    unified = max((o.rate for o in outcomes if o.layout.unified), default=0.0)
    if unified and not best.layout.unified:
        lines[0] += f", {best.rate / unified:.2f} x the best unified layout"
    if total_rate is not None:
        copies, gpus = gpus_for(best, total_rate)
        lines.append(f"for {total_rate:g} requests a second: {gpus} GPUs, {copies} x {best.layout.name}")
    return lines


# ---- Plot of goodput against rate, with the optional matplotlib.

FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """Raises ConfigError."""
    if Path(path).suffix not in FORMATS:
        raise ConfigError(f"--plot {path}: must end in {', '.join(FORMATS)}")
    _figure_class()


def draw(outcomes: Sequence[Outcome], *, share: float, title: str, path: str) -> None:
    """Plot a line per layout; unified ones are dashed, perfect service is grey."""
    figure = _figure_class()(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    highest = max((p.rate for o in outcomes for p in o.points if p.goodput > 0), default=1.0)
    axes.plot([0, highest], [0, highest], color="0.85", linewidth=1, zorder=0)
    for outcome in sorted(outcomes, key=lambda o: -o.rate):
        points = [p for p in outcome.points if p.rate <= 1.05 * highest]
        style = "--" if outcome.layout.unified else "-"
        label = f"{outcome.layout.name}: {outcome.rate:.3g}"
        (line,) = axes.plot([p.rate for p in points], [p.goodput for p in points], style, marker=".", label=label)
        if outcome.best:
            axes.plot([outcome.best.rate], [outcome.best.goodput], "o", color=line.get_color(), markersize=8)
    axes.set(
        xlabel="requests a second and GPU",
        ylabel="of these within the limits",
        title=title,
        xlim=(0, None),
        ylim=(0, None),
    )
    axes.legend(title=f"best rate with {100 * share:g} % good")
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error.strerror}") from None


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"--plot: {missing([error.name or 'matplotlib'], 'plan')}") from None
    return Figure
