"""The report of a GPU as a page: docs/reports/gpu.md, from the JSON of `make gpu-check`."""

from typing import Any

from deploy.bench.stats import table


def page(result: dict[str, Any], aims: str) -> str:
    """Return Markdown: what ran where, `aims`, then rows of the parts that have some."""
    made_by = result["environment"]
    parts = {name: part for name, part in result["parts"].items() if "error" not in part}
    versions = ", ".join(f"{name} {version}" for name, version in made_by["versions"].items())
    return "\n\n".join(
        [
            "# One GPU",
            f"{made_by['gpu']}, {versions}; commit {made_by['commit']}, {made_by['time'][:10]}. Command: `{made_by['command']}`. "
            "What the figures mean: [gpu.md](../gpu.md); all of them: [gpu_check.json](gpu_check.json).",
            aims,
            *(_section(title, parts[name], columns) for title, name, columns in SECTIONS if name in parts),
            "",
        ]
    )


def _section(title: str, part: dict[str, Any], columns: dict[str, str]) -> str:
    rows = part["rows"] if "rows" in part else _families(part)
    cells = [[form.format(**_words(row)) for form in columns.values()] for row in rows]
    return f"## {title}\n\n{table(list(columns), cells)}"


def _words(row: dict[str, Any]) -> dict[str, Any]:
    """A row, and what is said of it in words or in other units."""
    floor_ms, graph = row.get("floor_ms"), "no" if row.get("graphs") is False else "yes"
    return {
        **row,
        "graph": graph,
        "floor": "-" if floor_ms is None else f"{floor_ms:.2f}",
        "mb": row.get("bytes", 0) / 1e6,
    }


def _families(part: dict[str, Any]) -> list[dict[str, str]]:
    said = {family: ways for family, ways in part.items() if isinstance(ways, dict)}
    return [
        {"family": name, "triton": ways["triton"].split(":")[0], "torch": ways["torch"]} for name, ways in said.items()
    ]


_STEPS = {"batch": "{batch}", "graph": "{graph}", "ms": "{ms:.2f}", "ms of bytes read": "{floor}"}
_GAPS = {"batch": "{batch}", "depth": "{depth}", "step, ms": "{step_p50_ms:.2f}", "idle, us": "{gap_p50_us:.1f}"}
_TRANSFERS = {"MB": "{mb:.0f}", "transport": "{transport}", "ms": "{ms:.2f}", "GB/s": "{gb_s:.0f}"}
SECTIONS = (
    ("Decode steps of Qwen3-8B's shape at 1,024 tokens", "decode", _STEPS),
    ("Decode steps of 12 layers of Qwen3-30B-A3B's shape", "mixture", _STEPS),
    ("Gaps between decode steps", "gap", _GAPS),
    ("Short prompts", "short_prompts", {"tokens": "{tokens}", "graph": "{graph}", "ms": "{ms:.2f}"}),
    ("Sampling, 151,936 tokens", "sampler", {"batch": "{batch}", "kind": "{kind}", "ms": "{ms:.2f}"}),
    ("KV between two processes by NIXL", "transfer", _TRANSFERS),
    ("KV between two processes by Mooncake", "transfer_mooncake", _TRANSFERS),
    (
        "Greedy tokens of each family beside the CPU's, float32",
        "families",
        {"family": "{family}", "triton": "{triton}", "torch": "{torch}"},
    ),
)
