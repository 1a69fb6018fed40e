"""Runs the measures and writes docs/reports/benchmarks.md from their figures (`make bench`).

usage: python -m benchmarks.report [--only NAME ...] [--quick] [--set NAME=JSON ...] [--results DIR] [--reuse]
       python -m benchmarks.report --beside TREE [--rounds 15]     compares this tree with another checkout (side_by_side.py)

A measure runs in a process of its own; its figures are kept in DIR as JSON. --set gives a measure's function another argument;
--reuse only writes the page again from what is there. Sections of which nothing is there stay as they are, and so does what was written
behind a section's last line.
"""

import argparse
import importlib
import json
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import side_by_side
from benchmarks.cluster import ROOT
from benchmarks.measures import Tables, rendered
from deploy.bench.environment import describe

KEPT = ROOT / "docs" / "reports"
PAGE = KEPT / "benchmarks.md"
HEAD = "# Benchmarks\n\n`make bench` writes this page (benchmarks/report.py). Do not edit it by hand.\n"
STAMP = re.compile(r"^`(?:python -m benchmarks|make bench).*\n", re.MULTILINE)


class Measure(msgspec.Struct, frozen=True):
    """A section of docs/reports/benchmarks.md. `run`: "module:function", which returns tables."""

    title: str
    about: str
    run: str
    quick: dict[str, Any]


MEASURES = msgspec.toml.decode(Path(__file__).with_name("measures.toml").read_bytes(), type=dict[str, Measure])


def run(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Measure in this process, which does nothing else."""
    module, _, function = MEASURES[name].run.partition(":")
    tables: Tables = getattr(importlib.import_module(module), function)(**arguments)
    return {"environment": describe(), "arguments": arguments, "tables": tables}


def page(before: str, names: Iterable[str], results: Path) -> str:
    """Return docs/reports/benchmarks.md, which says `before`, with the sections of `names` of which there are results."""
    text = before or HEAD
    for name in names:
        path = results / f"{name}.json"
        if path.exists():
            text = with_section(text, name, json.loads(path.read_text()))
    return text


def with_section(page: str, name: str, result: dict[str, Any]) -> str:
    """Put a section in the place of its last version up to that one's stamp, or where its place among the others is."""
    measure = MEASURES[name]
    body = f"{measure.about}\n\n{rendered(result['tables'])}\n\n{_stamp(name, result)}\n"
    section = f"\n## {measure.title}\n\n{body}"
    begin = page.find(f"\n## {measure.title}\n")
    if begin >= 0:
        next_one = page.find("\n## ", begin + 1)
        end = len(page) if next_one < 0 else next_one
        stamp = STAMP.search(page, begin, end)
        return page[:begin] + section + page[stamp.end() if stamp else end :]
    order = list(MEASURES)
    later = (page.find(f"\n## {MEASURES[other].title}\n") for other in order[order.index(name) + 1 :])
    at = min((found for found in later if found >= 0), default=len(page))
    return page[:at] + section + page[at:]


def _stamp(name: str, result: dict[str, Any]) -> str:
    env = result["environment"]
    sets = "".join(f" --set {key}={json.dumps(value)}" for key, value in result.get("arguments", {}).items())
    versions = ", ".join(f"{key} {value}" for key, value in env["versions"].items())
    machine = f"{env['cpu']}, {env['cores']} cores, {env['memory_gib']} GiB" + (f", {env['gpu']}" if env["gpu"] else "")
    command = f'make bench ARGS="--only {name}{sets}"'
    return f"`{command}` on {machine}; commit {env['commit']}, {env['time']}; {versions}."


def _argument(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs: no page")
    parser.add_argument("--set", nargs="+", type=_argument, default=[], metavar="NAME=JSON", help="with one measure")
    parser.add_argument("--results", type=Path, default=ROOT / ".build" / "bench")
    parser.add_argument("--reuse", action="store_true", help="write the page from the JSON that is there")
    parser.add_argument("--beside", type=Path, metavar="TREE", help="another checkout")
    parser.add_argument("--rounds", type=int, default=7, help="with --beside")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    args.results.mkdir(parents=True, exist_ok=True)
    if args.beside:
        side_by_side.compare(args.beside.resolve(), ROOT, rounds=args.rounds, output=args.results / "beside.json")
        return
    for name in [] if args.reuse else args.only:
        arguments = (MEASURES[name].quick if args.quick else {}) | dict(args.set)
        output = args.results / f"{name}{'.quick' if args.quick else ''}.json"
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found = pool.submit(run, name, arguments).result()
        output.write_text(json.dumps(found, indent=1) + "\n")
        print(f"## {MEASURES[name].title}\n\n{rendered(found['tables'])}\n", flush=True)
    if not args.quick:
        PAGE.write_text(page(PAGE.read_text() if PAGE.exists() else "", args.only, args.results))
        print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
