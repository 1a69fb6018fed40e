"""docs/reports/house.md: the sizes, how long things are in each package, and which rooms import which."""

import ast
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from deploy.bench.stats import table
from tests.packages import PACKAGES
from tools.house.seams import imported, length, num_none
from tools.house.tree import Module, Tree

REPORT = "docs/reports/house.md"
STALE = 0.02  # of the lines of a total: what a few commits change
TOTAL = re.compile(r"^lines, (.+?) {2,}([\d,]+)", re.M)
Cell = Callable[[Sequence[Module]], str]


def page(tree: Tree, sizes: str) -> str:
    """No commit and no time: the page changes when the code does."""
    parts = {"packages": _packages(tree), "rooms": _rooms(tree), "longest": "\n".join(_longest(tree))}
    return Path(__file__).with_suffix(".md").read_text().format(sizes=sizes, **parts)


def stale(text: str, sizes: str) -> list[str]:
    """Totals of lines that `text`, the page, states and that `sizes` no longer has."""
    then, now = ({name: int(n.replace(",", "")) for name, n in TOTAL.findall(of)} for of in (text, sizes))
    return [
        f"{REPORT}: it has {then.get(name, 0):,} {name}, the tree {value:,}: run `make house`"
        for name, value in now.items()
        if abs(value - then.get(name, 0)) > STALE * value
    ]


def _packages(tree: Tree) -> str:
    columns = {name: list(tree.of(name)) for name in ("product", "tests", "tools", "benchmarks")}
    columns |= {name: [m for m in columns["product"] if m.path.startswith(f"{name}/")] for name in PACKAGES}
    rows: dict[str, Cell] = {
        "files / lines of Python": lambda ms: f"{len(ms)} / {sum(m.num_lines for m in ms):,}",
        "file median / p90 / max": lambda ms: _spread(m.num_lines for m in ms),
        "function median / p90 / max": lambda ms: _spread(length(f) for m in ms for _, f in m.functions),
        "class median / p90 / max": lambda ms: _spread(length(c) for m in ms for _, c in m.classes),
        "functions with docstring": _documented,
        "branches on None in 1,000 lines": lambda ms: _per_thousand(ms, sum(map(num_none, ms))),
        "Any / getattr / type: ignore": lambda ms: " / ".join(map(str, _loose_words(ms))),
    }
    columns = {name: modules for name, modules in columns.items() if modules}
    return table(["", *columns], [[name, *map(cell, columns.values())] for name, cell in rows.items()])


def _spread(values: Iterable[int]) -> str:
    found = sorted(values) or [0]
    return f"{statistics.median(found):g} / {found[min(len(found) - 1, len(found) * 9 // 10)]} / {found[-1]}"


def _documented(modules: Sequence[Module]) -> str:
    has = [ast.get_docstring(node, clean=False) is not None for module in modules for _, node in module.functions]
    return f"{sum(has) / max(1, len(has)):.0%}"


def _per_thousand(modules: Sequence[Module], count: int) -> str:
    return f"{1000 * count / max(1, sum(m.num_lines for m in modules)):.0f}"


def _loose_words(modules: Sequence[Module]) -> tuple[int, int, int]:
    names = Counter(node.id for module in modules for node in module.nodes(ast.Name))
    return names["Any"], names["getattr"], sum(module.text.count("# type: ignore") for module in modules)


def _rooms(tree: Tree) -> str:
    """A room is a sub-package of a package, or a module beside them; `lint-imports` forbids circles of them."""
    rows = []
    for package in PACKAGES:
        if pairs := _pairs(tree, package):
            most = (Counter(side).most_common(3) for side in zip(*pairs, strict=True))
            shown = [", ".join(f"{room} {n}" for room, n in side) for side in most]
            rows.append([package, str(len({*sum(pairs, ())})), str(len(pairs)), *shown])
    return table(["package", "rooms", "pairs joined by imports", "import most", "imported by most"], rows)


def _pairs(tree: Tree, package: str) -> list[tuple[str, str]]:
    """(room, another that it imports)."""
    found: set[tuple[str, str]] = set()
    for module in tree.of("product"):
        here = _room(module.dotted, package)
        there = {_room(name, package) for name in imported(module)} - {here, ""} if here else ()
        found.update((here, room) for room in there)
    return sorted(found)


def _room(dotted: str, package: str) -> str:
    parts = dotted.split(".")
    return parts[1] if parts[0] == package and len(parts) > 1 and parts[1] != "__main__" else ""


def _longest(tree: Tree) -> list[str]:
    """Files and classes; functions, parameters and imports that are too many have rows in house.toml."""
    files = {module.path: module.num_lines for module in tree.of("product")}
    classes = {f"{m.path}:{name}": length(node) for m in tree.of("product") for name, node in m.classes}
    largest = (
        (what, sorted(found.items(), key=lambda item: -item[1])[:8])
        for what, found in (("files", files), ("classes", classes))
    )
    return [f"- {what}: " + ", ".join(f"{key} {n}" for key, n in found) for what, found in largest]
