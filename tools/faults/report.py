"""Writes docs/reports/reliability.md from the results of the matrix and of the soak (JSON files; see `matrix.py`, `soak.py`)."""

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from deploy.bench.environment import describe
from tools.faults.cells import BACKENDS, MOVERS, SILENCE_S, Cell, Fault, Phase, Size, Victim, chosen, why_not
from tools.faults.memory import WARM_UP_S
from tools.faults.run_cell import FAULT_S, LONG, NUM_REQUESTS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / ".faults"  # of a run under way
REPORTS = ROOT / "docs" / "reports"
PAGE = REPORTS / "reliability.md"
MATRIX = "fault_matrix.json"
NOTICE = "death_notice.json"
RANK_FAULTS = REPORTS / "rank_faults.json"  # parts: pairs of shapes, cells of faults, starts, the soak
TITLES = {Size.SINGLE: "", Size.PAIRS: ", pairs"}
WHERE = {Size.SINGLE: "", Size.PAIRS: "pairs: "}
SOAKS = {backend: f"churn_soak_{backend}.json" for backend in BACKENDS}

NO_SOAK = "\nNo run of the present processes yet: `make churn-soak` adds it.\n"


def about_run() -> dict[str, Any]:
    """Where and how a run is made; call it when it begins."""
    return {**describe(), "began_s": time.time()}


def keep(path: Path, value: object) -> None:
    """A report to commit: one JSON file of docs/reports."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


class Rows:
    """Rows of one part of docs/reports/rank_faults.json, printed and kept as they come. Its other parts stay."""

    def __init__(self, path: Path, part: str) -> None:
        self._path, self._part = path, part
        self._report: dict[str, Any] = _read(path) or {}
        self._report.setdefault("about", {})[part] = about_run()
        self._report.setdefault(part, {})
        self.num_failed = 0

    def add(self, name: str, found: dict[str, Any]) -> None:
        """`found`: what the row came to, with its `problems`."""
        self.num_failed += bool(found["problems"])
        print(f"{'FAILED' if found['problems'] else 'ok    '} {name} {found}", flush=True)
        self._report[self._part][name] = found
        keep(self._path, self._report)


def rank_parser(part: str, what: str) -> argparse.ArgumentParser:
    """Arguments of a program of tools/faults/ranks."""
    parser = argparse.ArgumentParser(prog=f"python -m tools.faults.ranks.{part}", description=what)
    parser.add_argument("--report", type=Path, default=RANK_FAULTS)
    return parser


def write_page(reports: Path = REPORTS, page: Path = PAGE) -> None:
    """From the reports that there are; the other run's part of the page stays as it was."""
    figures = {"requests": NUM_REQUESTS, "twice": Size.PAIRS.workers * NUM_REQUESTS, "silence_s": SILENCE_S}
    text = _text("matrix").format(**figures, fault_s=FAULT_S, long=LONG)
    page.write_text(text + _matrix(_read(reports / MATRIX)) + _notice(_read(reports / NOTICE)) + _soaks(reports))


def _matrix(report: dict[str, Any] | None) -> str:
    cells = {} if report is None else report["cells"]
    text = "".join(
        f"\n### {backend}{TITLES[size]}\n\n{_table(cells, backend, size)}" for size in Size for backend in BACKENDS
    )
    return f"{text}\n{_reasons()}\n" + ("" if report is None else _figures(list(cells.values()), report["about"]))


def _table(results: dict[str, Any], backend: str, size: Size) -> str:
    lines = ["| fault | victim | " + " | ".join(Phase) + " |", "|---|---|" + "---|" * len(Phase)]
    for fault in Fault:
        for victim in Victim if backend == "nixl" else MOVERS:
            cells = [Cell(fault, victim, phase, backend, size) for phase in Phase]
            if all(why_not(cell) for cell in cells):
                continue
            lines.append(f"| {fault} | {victim} | " + " | ".join(_cell(results, cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(results: dict[str, Any], cell: Cell) -> str:
    found = results.get(cell.name)
    if found is None:
        return "not run"
    if not found["ok"]:
        return "**failed**: " + "; ".join(found["problems"]).replace("|", "/").replace("\n", " ")[:200]
    ends = ", ".join(f"{count} {end}" for end, count in sorted(found["ends"].items(), reverse=True))
    silence = f"; {found['silence_s']:.1f}" if cell.size is Size.PAIRS else ""
    return f"{ends}; {found['slowest_s']:.1f}; {found['settled_s']:.1f}{silence}"


def _reasons() -> str:
    """Rows that the tables do not have, faults of one reason together."""
    rows: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for size in Size:
        for fault in Fault:
            for reason, victims in _left_out(fault, size).items():
                rows.setdefault((WHERE[size], reason, tuple(victims)), []).append(fault)
    lines = [
        f"- {where}{', '.join(faults)} of {', '.join(victims)}: {reason}"
        for (where, reason, victims), faults in rows.items()
    ]
    lines.append("- mooncake: rows of victims without a transfer engine are those of nixl")
    return "No rows:\n\n" + "\n".join(lines) + "\n"


def _left_out(fault: Fault, size: Size) -> dict[str, list[str]]:
    """Victims by the reason; of pairs, what one worker a role has."""
    found: dict[str, list[str]] = {}
    for victim in Victim:
        reason = why_not(Cell(fault, victim, Phase.WAITING, size=size))
        if reason is not None and (size is Size.SINGLE or why_not(Cell(fault, victim, Phase.WAITING)) is None):
            found.setdefault(reason, []).append(victim)
    return found


def _figures(found: list[dict[str, Any]], about: dict[str, Any]) -> str:
    commits = Counter(r.get("commit", about["commit"]) for r in found)
    at = ", ".join(f"{commit} ({count} cells)" for commit, count in commits.items())
    loads = [r["load"] for r in found]
    worst = {name: max(r[name] for r in found) for name in ("slowest_s", "settled_s", "serves_s", "down_s")}
    return (
        f"{sum(r['ok'] for r in found)} of {len(chosen([]))} cells passed. At worst a request ended {worst['slowest_s']:.1f} s after "
        f"the fault began, the survivors were clean after {worst['settled_s']:.1f} s, a victim took {worst['down_s']:.1f} s to start, "
        f"and right answers came {worst['serves_s']:.1f} s after that. {_silences(found)}{_where({**about, 'commit': at})} The machine was shared: load average "
        f"{min(loads):.1f} to {max(loads):.1f} during the cells, so starts and answers are slower than alone.\n"
    )


def _silences(found: list[dict[str, Any]]) -> str:
    pairs = [r["silence_s"] for r in found if r["cell"].endswith(f":{Size.PAIRS}")]
    if not pairs:
        return ""
    return f"In pairs the longest silence of a stream was {max(pairs):.1f} s, its median over cells {statistics.median(pairs):.1f} s. "


def _notice(report: dict[str, Any] | None) -> str:
    if report is None:
        return ""
    rows = "".join(
        f"| {row['fault']} | {row['victim']} | {len(row['noticed_s'])} | {_spread(row['noticed_s'])} | {_spread(row['back_s'])} |\n"
        for row in report["rows"]
    )
    return _text("notice").format(rows=rows, **report["alarms"]) + "\n" + _where(report["about"]) + "\n"


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s; {max(seconds):.2f} s"


def _soaks(reports: Path) -> str:
    found = [(backend, report) for backend, name in SOAKS.items() if (report := _read(reports / name)) is not None]
    parts = [f"\n### {backend}\n\n{render(report)}\n{_where(report['about'])}\n" for backend, report in found]
    return "\n## Soak under churn\n" + ("".join(parts) or NO_SOAK)


def _where(about: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(about["began_s"]))
    return (
        f"Run `{about['command']}` at commit {about['commit']}, {when}; {about['cpu']}, {about['cores']} cores, "
        f"{about['memory_gib']} GiB, Python {about['python']}, {versions}."
    )


def _text(section: str) -> str:
    return (Path(__file__).parent / "pages" / f"{section}.md").read_text()


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


# ---- what a soak came to

BY_ROUTER = "cut by a router's death"  # the connection broke, or it does not know all workers again yet
FLAT_KIB_A_REQUEST = 0.25  # 5 MiB over 20,000 requests; a request that is never forgotten costs more
DEATHS = ("kill -9", "child killed", "SIGTERM")


def verdict(result: dict[str, Any]) -> list[str]:
    """What does not hold; empty when all is well.

    A worker of each role is always there, so no request ends with an error, but by a router's death.
    """
    bad = [f"wrong: {one}" for one in result["wrong"]] + list(result["problems"])
    if errors := result["ends"].get("error", 0):
        bad.append(f"{errors} requests ended with an error though a worker of each role was there")
    for one in result["trends"]:
        if (grown := _growth(one, result)) > FLAT_KIB_A_REQUEST:
            bad.append(
                f"{one['name']}: memory grows by {grown:.2f} KiB a request ({one['kib_a_minute']:.0f} KiB a minute)"
            )
    if not result["trends"]:
        bad.append("no process lived long enough to say anything of its memory")
    return bad


def _growth(trend: dict[str, Any], result: dict[str, Any]) -> float:
    """KiB a request, by the requests that the whole cluster served in that span."""
    return float(trend["growth_kib"] / (result["requests"] * trend["span_s"] / result["took_s"]))


def render(result: dict[str, Any]) -> str:
    events, bad = result["events"], verdict(result)
    ends = sorted(result["ends"].items(), key=lambda item: -item[1])
    return _text("soak").format(
        **result,
        minutes=result["took_s"] / 60,
        deaths=sum(events.get(how, 0) for how in DEATHS),
        died=_list(events, DEATHS),
        routers=events.get("router killed", 0),
        came=_list(events, ("back at its address", "replaced at a new address")),
        said=", ".join(f"{count:,} {end}" for end, count in ends),
        num_wrong=len(result["wrong"]),
        verdict="All holds." if not bad else "DOES NOT HOLD: " + "; ".join(bad),
        errors_table=_errors(result),
        num_trends=len(result["trends"]),
        warm_up_s=WARM_UP_S,
        flat=FLAT_KIB_A_REQUEST,
        trends_table=_trends(result),
    )


def _list(events: dict[str, int], names: tuple[str, ...]) -> str:
    return ", ".join(f"{events.get(name, 0)} {name}" for name in names)


def _errors(result: dict[str, Any]) -> str:
    if not result["errors"]:
        return ""
    rows = "".join(f"| {count} | {text.replace('|', '/')} |\n" for text, count in result["errors"].items())
    return f"| errors | message |\n|---:|---|\n{rows}\n"


def _trends(result: dict[str, Any]) -> str:
    head = "| process | mean MiB | KiB a minute | KiB a request | fitted over |\n|---|---:|---:|---:|---:|\n"
    return head + "".join(
        f"| {one['name']} | {one['mean_mib']:.1f} | {one['kib_a_minute']:+.1f} | {_growth(one, result):+.4f} | {one['span_s'] / 60:.1f} min |\n"
        for one in sorted(result["trends"], key=lambda one: one["name"])
    )
