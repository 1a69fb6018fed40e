"""`make lint`: the sizes of the repository, and what its rules find; exits 1 on any finding.

usage: python -m tools.house [--tighten] [--features] [--report FILE]
"""

import argparse
import gc
import importlib
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.packages import ROOT
from tools.house.ratchet import FILE, above, check, dump, limit_of, parse, tightened
from tools.house.register import Register
from tools.house.report import REPORT, page, stale
from tools.house.tree import Rule, Tree


def _rules() -> Iterator[Rule]:
    for name, row in tomllib.loads(Path(__file__).with_name("rules.toml").read_text()).items():
        module, _, function = row.pop("run").partition(":")
        yield Rule(name=name, measure=getattr(importlib.import_module(module), function), **row)


RULES = tuple(_rules())


def sizes(measured: Mapping[str, Mapping[str, int]], root: Path) -> str:
    """now / limit / aim of the totals of each rule; of a rule without totals: of its rows."""
    tables = parse((root / FILE).read_text())
    lines = [f"{'':44}{'now':>9}{'limit':>9}{'aim':>9}"]
    for rule in RULES:
        values, table = measured[rule.name], tables.get(rule.name, {})
        shown = {key: rule.aims.get(key) for key in (*rule.aims, *values) if key in rule.aims or key.startswith("all ")}
        rows = {
            f"{rule.name}, {key}": (values.get(key, 0), limit_of(rule, table, key), aim) for key, aim in shown.items()
        }
        rows = rows or {f"{rule.name} over {rule.most}": (len(above(rule, values)), len(table), rule.rows)}
        lines += [
            f"{name:44}{now:>9,}{limit:>9,}{'' if aim is None else format(aim, ','):>9}"
            for name, (now, limit, aim) in rows.items()
        ]
    return "\n".join(lines)


def main(argv: Sequence[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=__doc__)
    parser.add_argument("--tighten", action="store_true", help="lower the rows of house.toml; a new rule gets its rows")
    parser.add_argument("--report", type=Path, help="write the page with the sizes there, and check nothing")
    parser.add_argument(
        "--features", action="store_true", help="print what is known of each feature, and check nothing"
    )
    args = parser.parse_args(argv)
    tree = Tree.read(root)
    if args.features:
        print(Register(tree).table(), end="")
        return 0
    measured = {rule.name: rule.measure(tree) for rule in RULES}
    file = root / FILE
    if args.tighten:
        tables = parse(file.read_text()) if file.exists() else {}
        file.write_text(dump(RULES, {r.name: tightened(r, measured[r.name], tables.get(r.name)) for r in RULES}))
    table = sizes(measured, root)
    if args.report:
        args.report.write_text(page(tree, table))
        return 0
    found = [*check(RULES, measured, root), *stale((root / REPORT).read_text(), table)]
    print(table, *found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    gc.disable()  # the trees are large, and live until the end
    sys.exit(main(sys.argv[1:]))
