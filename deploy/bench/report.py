"""Tables of summaries. Pure."""

from collections.abc import Mapping, Sequence

from deploy.bench.stats import LATENCIES, Distribution, Summary

_LABELS = {"ttft_s": "TTFT ms", "itl_s": "ITL ms", "tpot_s": "TPOT ms", "e2e_s": "E2E ms"}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a GitHub-flavoured table."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join("| " + " | ".join(_cells(row, widths)) + " |" for row in [header, rule, *rows])


def summary_table(summary: Summary) -> str:
    errors = ", ".join(f"{kind}: {count}" for kind, count in summary.errors.items()) or "none"
    facts = [
        f"requests     {summary.completed} of {summary.requests} in {summary.duration_s:.2f} s; errors: {errors}",
        f"throughput   {summary.requests_per_s:.2f} req/s, {summary.input_tokens_per_s:,.0f} input tok/s, "
        f"{summary.output_tokens_per_s:,.0f} output tok/s",
    ]
    if summary.cached_tokens:
        facts.append(f"cached       {summary.cached_tokens:,} of {summary.prompt_tokens:,} prompt tokens")
    if summary.max_late_s > 0.05:
        facts.append(
            f"warning      sent up to {summary.max_late_s * 1000:.0f} ms late: the load generator was too slow"
        )
    rows = [[_LABELS[name], *_row(found)] for name in LATENCIES if (found := getattr(summary, name)) is not None]
    return "\n".join([*facts, "", table(["", "mean", "p50", "p90", "p99", "max"], rows)])


def ratio_table(found: Mapping[str, float], *, first: str, second: str) -> str:
    rows = [[name.replace("_s_p50", " p50").replace("_", " "), f"{ratio:.3f}"] for name, ratio in found.items()]
    return f"{second} over {first}\n\n" + table(["", "ratio"], rows)


def _row(found: Distribution) -> list[str]:
    return [f"{1000 * value:.2f}" for value in (found.mean, found.p50, found.p90, found.p99, found.max)]


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *rest = row
    return [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
