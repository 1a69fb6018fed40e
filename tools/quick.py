"""`make quick`: the tests that a change touches, nearest first, in less than 90 seconds on two cores.

usage: python -m tools.quick [--base REVISION] [--list]

A change is what the working tree differs in from the merge base with `--base` (origin/main, else main). It touches a module
that imports a changed one, directly or through others, in a function too; a test file also stands on the conftest.py of its
directories but for tests/conftest.py, on which all stand. A changed file that is not Python touches the modules that name it.
The fewer imports lie between, the nearer; the nearest run until their estimate (tests/durations.toml) fills the time.

Test files that start processes of the product load all of it unseen by import: what imports `STARTS` is left to `make test`,
unless it changed itself.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.cpu_seconds import timed_loop
from tools.durations import read_budgets
from tools.house.seams import perhaps_imported
from tools.house.tree import Module

ROOT = Path(__file__).parents[1]
CACHE = ".build/quick_imports.json"
STARTS = "tests/e2e/ranks/leaders.py"
SOURCES = (".py", ".c", ".h", ".cu")
OF_ALL = ("tests/conftest.py", "pyproject.toml", "Makefile", "tests/machine/needs.py")
DOCS = "tests/docs/"  # its tests read all pages
CORES, START_S, TIME_S = 2, 10.0, 75.0  # START_S: both processes collect and import torch


@dataclass(frozen=True)
class Choice:
    """`run`: in the order of nearness. `late`: beyond the time. `processes`: those that start processes of the product."""

    run: list[str]
    late: list[str]
    processes: list[str]


def git(root: Path, *args: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def changed_files(root: Path, base: str) -> set[str]:
    """Paths that differ from the merge base, committed or not; those that are gone, too."""
    (merge_base,) = git(root, "merge-base", base, "HEAD")
    return {*git(root, "diff", "--name-only", "--no-renames", merge_base), *others(root)}


def others(root: Path) -> list[str]:
    return git(root, "ls-files", "--others", "--exclude-standard")


def default_base(root: Path) -> str:
    found = git(root, "for-each-ref", "--format=%(refname:short)", "refs/remotes/origin/main")
    return found[0] if found else "main"


# ---- imports


def read_names(texts: Mapping[str, str], cache: Path) -> dict[str, list[str]]:
    """Path -> dotted names that it imports; what was parsed before comes from the cache, by content."""
    known = json.loads(cache.read_text()) if cache.exists() else {}
    keys = {path: hashlib.sha1(text.encode()).hexdigest() for path, text in texts.items()}
    found = {key: known.get(key) or sorted(perhaps_imported(Module(path, texts[path]))) for path, key in keys.items()}
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps(found))
    return {path: found[key] for path, key in keys.items()}


def importers(names: Mapping[str, Iterable[str]], files: Collection[str]) -> dict[str, set[str]]:
    """File -> modules that stand on it directly. `files`: all that a name may mean, files that are gone among them."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path, dotted in names.items():
        for file in {file for name in dotted for file in files_of(name) if file in files}:
            found[file].add(path)
        if path.startswith("tests/"):
            for folder in Path(path).parents:
                if (conftest := str(folder / "conftest.py")) in files and conftest not in (path, *OF_ALL):
                    found[conftest].add(path)
    return found


def files_of(dotted: str) -> Iterator[str]:
    """Files that an import of this name may run: the module, and the packages around it."""
    parts = dotted.split(".")
    yield "/".join(parts) + ".py"
    for end in range(1, len(parts) + 1):
        yield "/".join((*parts[:end], "__init__.py"))


def steps_from(sources: Iterable[str], edges: Mapping[str, set[str]]) -> dict[str, int]:
    """Module -> fewest imports between it and one of the sources."""
    found, ring, steps = dict.fromkeys(sources, 0), list(sources), 0
    while ring:
        steps += 1
        ring = sorted({path for file in ring for path in edges.get(file, ()) if path not in found})
        found.update(dict.fromkeys(ring, steps))
    return found


def named_by(changed: Iterable[str], texts: Mapping[str, str]) -> set[str]:
    """What names a changed file that is not Python, or is a module of the same name; the tests of pages, if it is one."""
    other = {file for file in changed if not file.endswith(".py")}
    found = {path for path in texts if path.startswith(DOCS) and any(file.endswith(".md") for file in other)}
    while other:
        pattern = re.compile("|".join(rf"(?<![\w.]){re.escape(Path(file).name)}(?!\w)" for file in other))
        named = {path for path, text in texts.items() if pattern.search(text)}
        named |= {path for file in other if (path := str(Path(file).with_suffix(".py"))) in texts}
        other = {path for path in named - found if not path.endswith(".py")}
        found |= named
    return found


# ---- the choice


def is_test(path: str) -> bool:
    return path.startswith("tests/") and Path(path).name.startswith("test_")


def choose(steps: Mapping[str, int], starting: Collection[str], needed_s: Mapping[str, float], most_s: float) -> Choice:
    """The nearest test files, cheap ones first among equals, while their CPU seconds fit into `most_s`."""
    choice, used_s = Choice([], [], []), 0.0
    for path in sorted(filter(is_test, steps), key=lambda path: (steps[path], needed_s[path], path)):
        if steps[path] and path in starting:
            choice.processes.append(path)
        elif used_s + needed_s[path] > most_s:
            choice.late.append(path)
        else:
            choice.run.append(path)
            used_s += needed_s[path]
    return choice


def touched(root: Path, changed: set[str]) -> tuple[dict[str, int], set[str], list[str]]:
    """Steps by touched module; the modules that start processes; all test files."""
    files = (*git(root, "ls-files"), *others(root))
    paths = [path for path in files if path.endswith(SOURCES) and (root / path).exists()]
    texts = {path: (root / path).read_text() for path in paths}
    names = read_names({path: text for path, text in texts.items() if path.endswith(".py")}, root / CACHE)
    edges = importers(names, {*texts, *changed})
    steps = steps_from({*changed, *named_by(changed, texts)} - set(OF_ALL), edges)
    there = {path: number for path, number in steps.items() if path in texts}
    return there, set(steps_from([STARTS], edges)), [path for path in texts if is_test(path)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.quick", description=__doc__)
    parser.add_argument("--base", default="", help="the revision that the change starts from")
    parser.add_argument("--list", action="store_true", help="name the test files, run none")
    args = parser.parse_args()
    changed = changed_files(ROOT, args.base or default_base(ROOT))
    steps, starting, tests = touched(ROOT, changed)
    budgets = read_budgets()
    slowness = min(timed_loop() for _ in range(5))[0] / budgets.loop_s
    needed_s = {path: slowness * seconds for path, seconds in budgets.estimates(tests).items()}
    choice = choose(steps, starting, needed_s, CORES * (TIME_S - START_S))
    about_s = START_S + sum(needed_s[path] for path in choice.run) / CORES
    print(
        f"{len(changed)} changed files touch {sum(map(is_test, steps))} of {len(tests)} test files; "
        f"{len(choice.run)} run, about {about_s:.0f} s",
        *(choice.run if args.list else ()),
        sep="\n  ",
    )
    status = 0
    if choice.run and not args.list:
        status = subprocess.call(
            [sys.executable, "-m", "pytest", "-q", "-n", str(CORES), "--dist", "loadscope", *choice.run],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    if concerned := sorted(changed.intersection(OF_ALL)):
        print(f"all tests stand on {', '.join(concerned)}: run make test")
    print(
        f"left to make test: {len(choice.processes) + len(choice.late)} files: {len(choice.processes)} start processes of the "
        f"product, {len(choice.late)} are beyond the time"
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
