"""Writes docs/reports/where.md from the JSON of what was measured."""

from pathlib import Path
from typing import Any

from benchmarks.measures import Row, rendered, shown
from benchmarks.where.loads import LOADS
from benchmarks.where.planned import AUTO, CHOICES, PAIRS, UNIFIED
from benchmarks.where.served import KNOWING, TPOT, TTFT

HEAD = """# Where to prefill

`python -m benchmarks.where page` writes this page from its JSON. Do not edit it by hand.

Fixed routes ([router](../router.md#routes)) and the router's decision per request: `pair` (with prefixes fetched), `decode` and `prefill` (whole
requests there), unified workers, `auto`. Loads: chat and agents are conversations whose prompts hold the answers before; bursts are prompts that
come at once; RAG has documents of unequal fame; the last two are Mooncake's traces (FAST'25).
"""


def write(report: Path, found: dict[str, Any]) -> None:
    parts = [
        HEAD,
        _planned(found["planned"]) if "planned" in found else "",
        _served(found["served"]) if "served" in found else "",
    ]
    report.with_suffix(".md").write_text("\n".join(filter(None, parts)))


# ---- the virtual world


def _planned(cells: dict[str, dict[str, Any]]) -> str:
    names = [one for one in LOADS if one.name in cells]
    goodput, ttft, later = list[Row](), list[Row](), list[Row]()
    for load in names:
        by = cells[load.name]
        fixed = max((by[one]["rate"] for one in CHOICES if one in by and one != AUTO), default=0.0)
        row: Row = {"load": load.name, "TTFT, TPOT, ms": f"{1e3 * load.ttft_s:g}, {1e3 * load.tpot_s:g}"}
        row |= {one: by[one]["rate"] for one in CHOICES if one in by}
        if AUTO in by and fixed:
            row["auto / best fixed"] = by[AUTO]["rate"] / fixed
        goodput.append(row)
        first = {one: next(p for p in by[one]["points"] if p["rate"] == load.guess) for one in CHOICES if one in by}
        at: Row = {"load": load.name, "at, req/s": load.guess}
        ttft.append(at | {one: _pair(1e3, p["ttft_p50_s"], p["ttft_s"]) for one, p in first.items()})
        if any(p["later_ttft_s"] for p in first.values()):
            later.append(at | {one: 1e3 * p["later_ttft_s"] if p["later_ttft_s"] else None for one, p in first.items()})
    stamps = {cell["environment"]["commit"] for by in cells.values() for cell in by.values()}
    env = next(cell["environment"] for by in cells.values() for cell in by.values())
    tables = {
        "Goodput: requests a second of the whole at which 90 % of the requests keep the objectives.": goodput,
        "TTFT p50 and p90, ms, at one rate for all choices.": ttft,
        "TTFT p50 of later turns, ms, at the same rates.": later,
    }
    about = (
        f"The planner ([what is a model](../planning.md#what-is-real-what-is-a-model)): Llama-3.1-8B on four H200, {PAIRS} or {UNIFIED}; real "
        "schedulers, roles, caches and router decisions, modelled step times and transfers. The router knows the objectives."
    )
    return f"## In the virtual world\n\n{about}\n\n{rendered(tables)}\n\n{_stamp(env, stamps)}"


# ---- real processes


def _served(found: dict[str, Any]) -> str:
    good, ttft = list[Row](), list[Row]()
    for name, load in found["loads"].items():
        points, head = load["points"], {"load": name, "offered, req/s": load["rate"]}
        shares = {one: p["good_share"] for one, p in points.items()}
        row: Row = {**head, "TTFT, TPOT, ms": _pair(1e3, load["ttft_s"], load["tpot_s"])}
        row |= {one: load["rate"] * share for one, share in shares.items()}
        if fixed := max(share for one, share in shares.items() if not one.startswith(AUTO)):
            row[f"{KNOWING} / best fixed"] = shares[KNOWING] / fixed
        good.append(row)
        ttft.append({**head, **{one: _pair(1e3, p["ttft_p50_s"], p["ttft_s"]) for one, p in points.items()}})
    turns: list[Row] = [
        {
            "": name,
            **{f"turn {i + 1}, ms": 1e3 * seconds for i, seconds in enumerate(of["ttft_s"])},
            "history tokens computed again": of["again"],
        }
        for name, of in found["turns"].items()
    ]
    tables = {
        "Good requests a second.": good,
        "TTFT p50 and p90, ms.": ttft,
        "Conversations alone on the cluster: TTFT p50 by turn, and tokens of history that no cache gave.": turns,
    }
    about = (
        f"One prefill and one decode worker (NIXL), or two unified workers, a thread and a core each; {found['layers']} layers as wide as "
        f"Qwen3-0.6B's, random weights; short versions of the loads, choices in turns after a round that counts for none, each with its router "
        f"alone. Objectives: {TTFT} times the prompt's and {TPOT} times a step's time of a request alone; `{KNOWING}` has them in headers, no "
        f"other choice has. Others left {found['cores_left']:.1f} cores."
    )
    commits = {part["commit"] for part in (*found["loads"].values(), *found["turns"].values())}
    return f"## Real processes\n\n{about}\n\n{rendered(tables)}\n\n{_stamp(found['environment'], commits)}"


def _pair(scale: float, *values: float | None) -> str:
    return ", ".join("-" if value is None else shown(scale * value) for value in values)


def _stamp(env: dict[str, Any], commits: set[str]) -> str:
    return f"Run `{env['command']}` at commit {', '.join(sorted(commits))}, {env['time']}; {env['cpu']}, {env['cores']} cores.\n"
