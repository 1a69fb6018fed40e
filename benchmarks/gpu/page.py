"""The report of a GPU as a page: docs/reports/gpu.md, from the JSON of `make gpu-check`."""

from typing import Any

from deploy.bench.stats import table

Rows = list[list[str]]


def page(result: dict[str, Any], aims: str) -> str:
    """Return Markdown: what ran where, `aims`, then rows of the parts that have some."""
    made_by, parts = result["environment"], result["parts"]
    versions = ", ".join(f"{name} {version}" for name, version in made_by["versions"].items())
    return "\n\n".join(
        [
            "# One GPU",
            f"{made_by['gpu']}, {versions}; commit {made_by['commit']}, {made_by['time'][:10]}. Command: `{made_by['command']}`. "
            "What the figures mean: [gpu.md](../gpu.md); all of them: [gpu_check.json](gpu_check.json).",
            aims,
            *(_section(title, heads, rows(parts[name])) for title, name, heads, rows in SECTIONS if _has(parts, name)),
            "",
        ]
    )


def _has(parts: dict[str, Any], name: str) -> bool:
    return name in parts and "error" not in parts[name]


def _section(title: str, heads: list[str], rows: Rows) -> str:
    return f"## {title}\n\n{table(heads, rows)}"


def _steps(part: dict[str, Any]) -> Rows:
    return [
        [str(row["batch"]), "no" if row.get("graphs") is False else "yes", f"{row['ms']:.2f}", _ms(row["floor_ms"])]
        for row in part["rows"]
    ]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _gaps(part: dict[str, Any]) -> Rows:
    return [
        [str(row["batch"]), str(row["depth"]), f"{row['step_p50_ms']:.2f}", f"{row['gap_p50_us']:.1f}"]
        for row in part["rows"]
    ]


def _prompts(part: dict[str, Any]) -> Rows:
    return [[str(row["tokens"]), "yes" if row["graphs"] else "no", f"{row['ms']:.2f}"] for row in part["rows"]]


def _samples(part: dict[str, Any]) -> Rows:
    return [[str(row["batch"]), row["kind"], f"{row['ms']:.2f}"] for row in part["rows"]]


def _transfers(part: dict[str, Any]) -> Rows:
    return [
        [f"{row['bytes'] / 1e6:.0f}", row["transport"], f"{row['ms']:.2f}", f"{row['gb_s']:.0f}"]
        for row in part["rows"]
    ]


def _families(part: dict[str, Any]) -> Rows:
    return [
        [family, said["triton"].split(":")[0], said["torch"]] for family, said in part.items() if isinstance(said, dict)
    ]


_STEP = ["batch", "graph", "ms", "ms of bytes read"]
SECTIONS = (
    ("Decode steps of Qwen3-8B's shape at 1,024 tokens", "decode", _STEP, _steps),
    ("Decode steps of 12 layers of Qwen3-30B-A3B's shape", "mixture", _STEP, _steps),
    ("Gaps between decode steps", "gap", ["batch", "depth", "step, ms", "idle, us"], _gaps),
    ("Short prompts", "short_prompts", ["tokens", "graph", "ms"], _prompts),
    ("Sampling, 151,936 tokens", "sampler", ["batch", "kind", "ms"], _samples),
    ("KV between two processes by NIXL", "transfer", ["MB", "transport", "ms", "GB/s"], _transfers),
    ("KV between two processes by Mooncake", "transfer_mooncake", ["MB", "transport", "ms", "GB/s"], _transfers),
    ("Greedy tokens of each family beside the CPU's, float32", "families", ["family", "triton", "torch"], _families),
)
