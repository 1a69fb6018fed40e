"""`make house`: how big the parts of the product are, and which way their imports run; writes docs/reports/house.md.

usage: python -m tools.house.report [--report FILE]

A room is a sub-package of a package, or a module beside them. An arrow is one room's import of another. Arrows that run back
up are the fewest that remain in the best order of the rooms (a minimum feedback arc set), whatever the order of the text.
"""

import argparse
import ast
import asyncio
import itertools
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from deploy.bench.environment import commit
from tests.packages import PACKAGES, ROOT

REPORT = ROOT / "docs/reports/house.md"
LONG_FUNCTION = 70  # lines
DRAWN = ("router", "engine", "transfer_backends", "disagg", "service", "planner")  # packages whose arrows are counted
# The review of b1211d6, before the renovation: its figures, as it gives them.
BEFORE = {
    "product: lines": "45,533",
    "product: files": "414",
    "class names used twice": "53",
    "router: files in a plain stream": "43",
    "router: arrows back up": "13",
    "engine: arrows back up": "6",
    "biggest class: lines": "523",
    "most methods of a class": "53",
    "tests: lines": "45.6k",
    "docs: words": "43k",
}
MAX_EXACT = 14  # rooms; beyond that the order is found by moving one room at a time


@dataclass
class Source:
    """What the syntax trees of some files say. Lengths are in lines."""

    files: dict[str, int] = field(default_factory=dict)
    functions: list[tuple[int, str]] = field(default_factory=list)
    parameters: list[tuple[int, str]] = field(default_factory=list)
    constructors: list[tuple[int, str]] = field(default_factory=list)
    classes: list[tuple[int, int, str]] = field(default_factory=list)  # (lines, methods, name)
    homes: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # public class -> files
    documented: int = 0
    docstring_lines: int = 0
    comment_lines: int = 0
    words: Counter[str] = field(default_factory=Counter)

    def read(self, path: Path) -> None:
        """Add one file."""
        name, text = str(path.relative_to(ROOT)), path.read_text()
        tree, lines = ast.parse(text), text.splitlines()
        self.files[name] = len(lines)
        self.comment_lines += sum(line.lstrip().startswith("#") for line in lines)
        self.words["type: ignore"] += text.count("# type: ignore")
        for node in ast.walk(tree):
            self._read_node(node, name)

    def _read_node(self, node: ast.AST, file: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._read_function(node, file)
        elif isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            self.classes.append((_length(node), len(methods), f"{file}:{node.name}"))
            if not node.name.startswith("_"):
                self.homes[node.name].append(file)
        elif isinstance(node, ast.Name) and node.id in ("Any", "getattr"):
            self.words[node.id] += 1
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node, clean=False)
            self.docstring_lines += 0 if said is None else said.count("\n") + 1

    def _read_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, file: str) -> None:
        where = f"{file}:{node.name}"
        self.functions.append((_length(node), where))
        self.documented += ast.get_docstring(node) is not None
        given = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in given if name not in ("self", "cls")])
        self.parameters.append((count, where))
        if node.name == "__init__":
            self.constructors.append((count, where))

    @property
    def num_lines(self) -> int:
        return sum(self.files.values())


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def read_source(folders: Iterable[str]) -> Source:
    """All Python files of these folders."""
    source = Source()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source.read(path)
    return source


# ---- arrows


def room_of(module: str, package: str) -> str | None:
    """The room of `package` that a module lies in; None: it lies elsewhere, or is the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == package and len(parts) > 1 and parts[1] != "__main__" else None


def arrows(package: str) -> dict[tuple[str, str], int]:
    """(room, room it imports) -> files that do."""
    found: Counter[tuple[str, str]] = Counter()
    for path in sorted((ROOT / package).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        here = room_of(module, package)
        if here is None or here == "__init__":
            continue
        there = {room_of(name, package) for name in _imports(ast.parse(path.read_text()))}
        found.update((here, room) for room in there if room is not None and room != here)
    return dict(found)


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module.count(".") == 0)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def fewest_back_up(found: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The arrows that run back up in the best order of the rooms. Only rooms that reach one another have such arrows."""
    pairs = sorted(set(found))
    reached = _reached(pairs)
    back: list[tuple[str, str]] = []
    for circle in {frozenset(b for b in reached[a] if a in reached[b]) for a in reached if a in reached[a]}:
        inside = [pair for pair in pairs if circle.issuperset(pair)]
        order = _best_order(sorted(circle), inside) if len(circle) <= MAX_EXACT else _good_order(sorted(circle), inside)
        place = {room: i for i, room in enumerate(order)}
        back += [(a, b) for a, b in inside if place[a] > place[b]]
    return sorted(back)


def _reached(pairs: Sequence[tuple[str, str]]) -> dict[str, set[str]]:
    """room -> the rooms that it imports, and what those import, and so on."""
    reached = {room: {b for a, b in pairs if a == room} for room in sorted({room for pair in pairs for room in pair})}
    for middle, room in itertools.product(reached, reached):  # Warshall
        if middle in reached[room]:
            reached[room] |= reached[middle]
    return reached


def _best_order(rooms: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Exact, over all sets of rooms that can stand on top: 2^rooms steps."""
    index = {room: i for i, room in enumerate(rooms)}
    into = [0] * len(rooms)  # bit set of the rooms that a room imports
    for a, b in pairs:
        into[index[a]] |= 1 << index[b]
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for size in range(len(rooms)):
        for chosen in itertools.combinations(range(len(rooms)), size):
            above = sum(1 << i for i in chosen)
            cost, order = best[above]
            for i in set(range(len(rooms))) - set(chosen):
                after = (cost + (into[i] & above).bit_count(), [*order, i])
                best[above | 1 << i] = min(best.get(above | 1 << i, after), after)
    return [rooms[i] for i in best[(1 << len(rooms)) - 1][1]]


def _good_order(rooms: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Move one room at a time while that helps, from the order by what each imports less what imports it."""
    weight = Counter(a for a, _ in pairs)
    weight.subtract(Counter(b for _, b in pairs))
    order = sorted(rooms, key=lambda room: -weight[room])
    best = _back_up(order, pairs)
    improved = True
    while improved:
        improved = False
        for room, at in itertools.product(rooms, range(len(rooms))):
            tried = [r for r in order if r != room]
            tried.insert(at, room)
            if (count := _back_up(tried, pairs)) < best:
                order, best, improved = tried, count, True
    return order


def _back_up(order: Sequence[str], pairs: Iterable[tuple[str, str]]) -> int:
    place = {room: i for i, room in enumerate(order)}
    return sum(place[a] > place[b] for a, b in pairs)


# ---- what a plain request enters


def entered_by_a_plain_stream() -> tuple[list[str], int]:
    """Files of the product that a streamed completion enters in the router, in order of first touch; and calls between files."""
    files: dict[str, None] = {}
    calls = 0

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        if event != "call":
            return
        name = _product_file(frame.f_code.co_filename)
        if name is None:
            return
        files.setdefault(name)
        back = frame.f_back
        calls += back is not None and back.f_code.co_filename != frame.f_code.co_filename

    asyncio.run(_one_stream(watch))
    return list(files), calls


def _product_file(name: str) -> str | None:
    path = Path(name)
    if not path.is_relative_to(ROOT):
        return None
    relative = path.relative_to(ROOT)
    return str(relative) if relative.parts[0] in PACKAGES else None


async def _one_stream(watch: Any) -> None:
    """The second request of a router with a prefill and a decode worker: the first one opens connections."""
    from tests.router.dummies import cluster

    body = {"model": "m", "prompt": "hello", "max_tokens": 4, "stream": True}
    quiet = {"health_check_interval_s": 1000.0, "load_poll_interval_s": 1000.0}
    async with cluster(prefill=1, decode=1, **quiet) as c:
        for watched in (False, True):
            sys.setprofile(watch if watched else None)
            status, _, answer = await c.post("/v1/completions", body)
            sys.setprofile(None)
            assert status == 200, answer


# ---- the page


def page() -> str:
    """docs/reports/house.md."""
    whole = read_source(PACKAGES)
    files, calls = entered_by_a_plain_stream()
    lines = [
        "# The house",
        "",
        f"Written by `make house` at {commit() or 'a tree without git'}. A length is in lines. "
        "p90: nine of ten are no longer.",
        "",
        *_ends(whole, len(files)),
        "",
        *_sizes(whole),
        "",
        "## Arrows between rooms",
        "",
        *_arrow_table(),
        "",
        f"## A plain stream in the router: {len(files)} files, {calls} calls from file to file",
        "",
        "```",
        *files,
        "```",
        "",
        "## Class names that are used twice",
        "",
        *(_twice(whole) or ["None."]),
        "",
        "## Longest",
        "",
        *_longest(whole),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _ends(whole: Source, num_stream_files: int) -> list[str]:
    """Where the renovation began and where it is now. `tests` has no harness that is in tools, `docs` no report."""
    now = {
        "product: lines": whole.num_lines,
        "product: files": len(whole.files),
        "class names used twice": len(_twice(whole)),
        "router: files in a plain stream": num_stream_files,
        "router: arrows back up": len(fewest_back_up(arrows("router"))),
        "engine: arrows back up": len(fewest_back_up(arrows("engine"))),
        "biggest class: lines": max(lines for lines, _, _ in whole.classes),
        "most methods of a class": max(methods for _, methods, _ in whole.classes),
        "tests: lines": read_source(["tests"]).num_lines,
        "docs: words": _words_of_docs(),
    }
    assert now.keys() == BEFORE.keys()
    table = ["| | b1211d6 | now |", "|---|---|---|"]
    return table + [f"| {what} | {BEFORE[what]} | {count:,} |" for what, count in now.items()]


def _words_of_docs() -> int:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "reports" not in path.parts]
    return sum(len(path.read_text().split()) for path in pages)


def _sizes(whole: Source) -> list[str]:
    columns = {"product": whole} | {name: read_source([name]) for name in PACKAGES}
    tests, tools = read_source(["tests"]), read_source(["tools"])
    rows = {
        "files / lines": lambda s: f"{len(s.files)} / {s.num_lines:,}",
        "file median / p90 / max": lambda s: _spread(s.files.values()),
        "function median / p90 / p99 / max": lambda s: _spread((n for n, _ in s.functions), p99=True),
        f"functions over {LONG_FUNCTION}": lambda s: str(sum(n > LONG_FUNCTION for n, _ in s.functions)),
        "parameters p90 / max": lambda s: _tail(n for n, _ in s.parameters),
        "constructor parameters p90 / max": lambda s: _tail(n for n, _ in s.constructors),
        "biggest class: lines, methods": lambda s: "{}, {}".format(*max(s.classes, default=(0, 0, ""))[:2]),
        "most methods of a class": lambda s: str(max((m for _, m, _ in s.classes), default=0)),
        "functions with docstring": lambda s: f"{s.documented / max(1, len(s.functions)):.0%}",
        "docstring lines": lambda s: f"{s.docstring_lines / max(1, s.num_lines):.1%}",
        "class names used twice": lambda s: str(sum(len(set(homes)) > 1 for homes in s.homes.values())),
        "Any / getattr / type: ignore": lambda s: " / ".join(
            str(s.words[w]) for w in ("Any", "getattr", "type: ignore")
        ),
    }
    table = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    table += [f"| {name} | " + " | ".join(cell(s) for s in columns.values()) + " |" for name, cell in rows.items()]
    return [
        *table,
        "",
        f"Tests: {len(tests.files)} files, {tests.num_lines:,} lines. Tools (harness of soaks, faults and fuzz among them): "
        f"{len(tools.files)} files, {tools.num_lines:,} lines.",
    ]


def _spread(values: Iterable[int], *, p99: bool = False) -> str:
    found = sorted(values) or [0]
    cuts = [statistics.median(found), _share(found, 0.9), *([_share(found, 0.99)] if p99 else []), found[-1]]
    return " / ".join(f"{cut:g}" for cut in cuts)


def _tail(values: Iterable[int]) -> str:
    found = sorted(values) or [0]
    return f"{_share(found, 0.9)} / {found[-1]}"


def _share(found: Sequence[int], share: float) -> int:
    return found[min(len(found) - 1, int(share * len(found)))]


def _arrow_table() -> list[str]:
    table = ["| package | rooms | joined pairs | both ways | back up |", "|---|---|---|---|---|"]
    for package in DRAWN:
        found = arrows(package)
        rooms = {room for pair in found for room in pair}
        joined = {frozenset(pair) for pair in found}
        both = sorted({tuple(sorted(pair)) for pair in found if pair[::-1] in found})
        back = fewest_back_up(found)
        said = f"{len(back)}: " + ", ".join(f"{a} → {b}" for a, b in back) if back else "0"
        possible = len(rooms) * (len(rooms) - 1) // 2
        table.append(f"| {package} | {len(rooms)} | {len(joined)} of {possible} | {len(both)} | {said} |")
    return table


def _twice(whole: Source) -> list[str]:
    homes = {name: sorted(set(files)) for name, files in whole.homes.items() if len(set(files)) > 1}
    return [f"- `{name}`: {', '.join(files)}" for name, files in sorted(homes.items())]


def _longest(whole: Source) -> list[str]:
    files = sorted(((n, name) for name, n in whole.files.items()), reverse=True)[:8]
    classes = sorted(whole.classes, reverse=True)[:8]
    functions = sorted(whole.functions, reverse=True)[:8]
    return [
        "- files: " + ", ".join(f"{name} {n}" for n, name in files),
        "- classes: " + ", ".join(f"{name} {n} ({methods} methods)" for n, methods, name in classes),
        "- functions: " + ", ".join(f"{name} {n}" for n, name in functions),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.house.report", description=__doc__)
    parser.add_argument("--report", type=Path, default=REPORT, help="the page to write")
    args = parser.parse_args()
    args.report.write_text(page())
    print(f"written: {args.report}")


if __name__ == "__main__":
    main()
