"""The report of a GPU as a page: docs/reports/gpu.md, from the JSON of `make gpu-check`."""

import tomllib
from pathlib import Path
from typing import Any

from deploy.bench.stats import table

TABLES = tomllib.loads(Path(__file__).with_name("parts.toml").read_text())["tables"]


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
            *(_section(one["title"], parts[one["part"]], one["columns"]) for one in TABLES if one["part"] in parts),
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
