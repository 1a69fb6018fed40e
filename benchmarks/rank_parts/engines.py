"""One model on two cores in four ways: workers side by side, asked in turns."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster import Cluster, load_records, tandem_up
from benchmarks.random_model import write_model
from deploy.bench.report import table
from deploy.bench.stats import RequestRecord

TITLE = "One model on two cores"
TEXT = (
    "Random bf16 weights in the shape of Qwen3-0.6B with a small vocabulary (benchmarks/random_model.py), one unified worker for each"
    " way, all on this machine, asked in turns: only one computes at a time. Medians over the rounds. The aim: two ranks within 10 % of one"
    " process with two threads."
)

WAYS = {
    "one thread": ("--num-threads", "1"),
    "two threads": ("--num-threads", "2"),
    "--tp-size 2": ("--tp-size", "2", "--num-threads", "1"),
    "--pp-size 2": ("--pp-size", "2", "--num-threads", "1"),
}
FLAGS = ("--unified", "--max-total-tokens", "32768", "--disable-radix-cache", "--log-level", "warning")
SHORT, LONG = 64, 4096  # tokens of a prompt; the long one is four chunks
OUTPUT = 24
BATCH = 8


def measure(*, rounds: int) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-ranks-")))
        write_model(folder)
        clusters = {
            name: stack.enter_context(tandem_up("--model-path", str(folder), *FLAGS, *flags))
            for name, flags in WAYS.items()
        }
        found: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
        for n in range(rounds):
            for name, cluster in clusters.items():
                found[name].append(_round(cluster, seed=n))
    return [{"way": name, **_medians(rows)} for name, rows in found.items()]


def render(rows: list[dict[str, Any]]) -> str:
    base = next(row for row in rows if row["way"] == "two threads")

    def cell(row: dict[str, Any], key: str, scale: float) -> str:
        return f"{row[key] * scale:.1f} ({row[key] / base[key]:.2f})"

    return table(
        [
            "way (beside two threads)",
            "ITL of 1, ms",
            f"ITL of {BATCH}, ms",
            f"TTFT of {SHORT} tokens, ms",
            f"of {LONG}, s",
        ],
        [
            [
                row["way"],
                cell(row, "itl_1_s", 1e3),
                cell(row, "itl_8_s", 1e3),
                cell(row, "ttft_short_s", 1e3),
                cell(row, "ttft_long_s", 1),
            ]
            for row in rows
        ],
    )


def _round(cluster: Cluster, *, seed: int) -> dict[str, float]:
    one = _ask(cluster, seed, num_requests=2, concurrency=1, input_len=SHORT, output_len=OUTPUT)
    many = _ask(cluster, seed, num_requests=BATCH, concurrency=BATCH, input_len=SHORT, output_len=OUTPUT)
    long = _ask(cluster, seed, num_requests=1, concurrency=1, input_len=LONG, output_len=2)
    return {
        "itl_1_s": _itl(one),
        "itl_8_s": _itl(many),
        "ttft_short_s": _ttft(one),
        "ttft_long_s": _ttft(long),
    }


def _ask(cluster: Cluster, seed: int, **flags: Any) -> Sequence[RequestRecord]:
    (found,) = load_records(url=cluster.url, prompt="ids", warmup=0, seed=seed, **flags)
    return found.records


def _itl(records: Sequence[RequestRecord]) -> float:
    return median(gap for record in records for gap in record.itl_s)


def _ttft(records: Sequence[RequestRecord]) -> float:
    return median(record.ttft_s for record in records if record.ttft_s is not None)


def _medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: median(row[key] for row in rows) for key in rows[0]}
