"""Statistics of a load test. Pure.

Metrics by vLLM's names. ttft: sent to first text. itl: gaps between text events (perhaps of several
tokens). tpot: (e2el - ttft) / (output tokens - 1). e2el: sent to last byte. Percentiles as numpy's.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

PERCENTS = (50, 90, 99)
LATENCIES = ("ttft_s", "itl_s", "tpot_s", "e2e_s")


class RequestRecord(msgspec.Struct, kw_only=True):
    """Times in seconds. `sent_s`: from the run's start. `late_s`: delay of sending (open loop).
    `*_source`: what counted the tokens. `text`: the answer, if wanted.
    """

    idx: int
    sent_s: float
    late_s: float = 0.0
    ttft_s: float | None = None
    itl_s: list[float] = []
    e2e_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    detail: str = ""
    prompt_source: str = ""
    output_source: str = ""
    text: str = ""


class Distribution(msgspec.Struct, frozen=True):
    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are of full answers."""

    requests: int
    completed: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    max_late_s: float
    ttft_s: Distribution | None
    itl_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(values: Sequence[float]) -> Distribution | None:
    if not values:
        return None
    p50, p90, p99 = (percentile(values, percent) for percent in PERCENTS)
    return Distribution(len(values), sum(values) / len(values), p50, p90, p99, max(values))


def summarize(records: Sequence[RequestRecord], *, duration_s: float) -> Summary:
    good = [record for record in records if record.error is None]
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    found = {name: distribution(values) for name, values in latencies(records).items()}
    return Summary(
        requests=len(records),
        completed=len(good),
        errors=dict(sorted(Counter(record.error for record in records if record.error is not None).items())),
        duration_s=duration_s,
        requests_per_s=len(good) * per_s,
        input_tokens_per_s=prompt_tokens * per_s,
        output_tokens_per_s=output_tokens * per_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(record.cached_tokens for record in good),
        max_late_s=max((record.late_s for record in records), default=0.0),
        ttft_s=found["ttft"],
        itl_s=found["itl"],
        tpot_s=found["tpot"],
        e2e_s=found["e2el"],
    )


def tpot_s(record: RequestRecord) -> float | None:
    """Per later output token, if any."""
    if record.ttft_s is None or record.output_tokens < 2:
        return None
    return (record.e2e_s - record.ttft_s) / (record.output_tokens - 1)


def is_good(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    """`limits`: seconds by metric. As in vLLM, an answer of one token has a tpot of 0."""
    if record.error is not None or ("ttft" in limits and record.ttft_s is None):
        return False
    found = {"ttft": record.ttft_s or 0.0, "tpot": tpot_s(record) or 0.0, "e2el": record.e2e_s}
    return all(found[name] <= limit_s for name, limit_s in limits.items())


def latencies(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Seconds of full answers by metric."""
    good = [record for record in records if record.error is None]
    return {
        "ttft": [record.ttft_s for record in good if record.ttft_s is not None],
        "tpot": [tpot for record in good if (tpot := tpot_s(record)) is not None],
        "itl": [gap for record in good for gap in record.itl_s],
        "e2el": [record.e2e_s for record in good],
    }


def ratios(first: Summary, second: Summary) -> dict[str, float]:
    """Second / first of median latencies and rates."""
    found = {}
    for name in ("requests_per_s", "output_tokens_per_s"):
        found[name] = _ratio(getattr(first, name), getattr(second, name))
    for name in LATENCIES:
        one, two = getattr(first, name), getattr(second, name)
        if one is not None and two is not None:
            found[f"{name}_p50"] = _ratio(one.p50, two.p50)
    return found


def _ratio(one: Any, two: Any) -> float:
    return float(two / one) if one else float("nan")


# ---- Tables of summaries. Pure.


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join("| " + " | ".join(_cells(row, widths)) + " |" for row in [header, rule, *rows])


def summary_lines(summary: Summary, *, is_limited: bool = False) -> list[str]:
    """`is_limited`: requests of an open loop may wait for a place."""
    errors = ", ".join(f"{kind}: {count}" for kind, count in summary.errors.items()) or "none"
    facts = [
        f"requests     {summary.completed} of {summary.requests} in {summary.duration_s:.2f} s; errors: {errors}",
        f"throughput   {summary.requests_per_s:.2f} req/s, {summary.input_tokens_per_s:,.0f} input tok/s, "
        f"{summary.output_tokens_per_s:,.0f} output tok/s",
    ]
    if summary.cached_tokens:
        facts.append(f"cached       {summary.cached_tokens:,} of {summary.prompt_tokens:,} prompt tokens")
    if summary.max_late_s > 0.05:
        late_ms = 1000 * summary.max_late_s
        facts.append(
            f"waited       up to {late_ms:,.0f} ms for --concurrency, before TTFT counts"
            if is_limited
            else f"warning      sent up to {late_ms:.0f} ms late: the load generator was too slow"
        )
    return facts


def token_line(records: Sequence[RequestRecord]) -> str:
    good = [record for record in records if record.error is None]
    found = []
    for name in ("prompt", "output"):
        total = sum(getattr(record, f"{name}_tokens") for record in good)
        sources = Counter(getattr(record, f"{name}_source") for record in good)
        by = ", ".join(source if len(sources) == 1 else f"{source}: {n}" for source, n in sorted(sources.items()))
        found.append(f"{total:,} {name} ({by or 'none'})")
    return f"tokens       {', '.join(found)}"


def goodput_line(records: Sequence[RequestRecord], limits: Mapping[str, float], *, duration_s: float) -> str:
    good = sum(is_good(record, limits) for record in records)
    within = ", ".join(f"{name} {1000 * limit_s:g} ms" for name, limit_s in limits.items())
    per_s = good / duration_s if duration_s > 0 else 0.0
    return f"goodput      {per_s:.2f} req/s: {good} of {len(records)} requests within {within}"


def latency_table(
    records: Sequence[RequestRecord], *, metrics: Sequence[str] | None = None, percents: Sequence[float] = PERCENTS
) -> str:
    """Milliseconds; metrics without a value have no row."""
    found = latencies(records)
    rows = []
    for name in found if metrics is None else metrics:
        if values := found[name]:
            shown = [sum(values) / len(values), *(percentile(values, percent) for percent in percents), max(values)]
            rows.append([f"{name.upper()} ms", *(f"{1000 * value:.2f}" for value in shown)])
    return table(["", "mean", *(f"p{percent:g}" for percent in percents), "max"], rows)


def ratio_table(found: Mapping[str, float], *, first: str, second: str) -> str:
    rows = [[name.replace("_s_p50", " p50").replace("_", " "), f"{ratio:.3f}"] for name, ratio in found.items()]
    return f"{second} over {first}\n\n" + table(["", "ratio"], rows)


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *rest = row
    return [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
