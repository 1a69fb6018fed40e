"""Apply a table of moves to the working tree: python -m tools.moves TABLE. It needs no second run: that changes nothing."""

import argparse
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.moves.merge import merged
from tools.moves.module import rewritten
from tools.moves.registers import features_of, layers_of, sums_of
from tools.moves.table import INIT, Table

ROOT = Path(__file__).parents[2]
TEXT = (
    ".py",
    ".md",
    ".toml",
    ".c",
    ".h",
    ".cu",
    ".js",
    ".json",
    ".yaml",
    ".yml",
    ".sh",
    ".html",
    ".css",
    "Makefile",
    "file",
)
LEFT = ("docs/reports/", "tools/moves/", ".git")  # what was measured there keeps the names of its day
HOUSE = ("tests/house/", "tools/house/")  # which lists the words that names should not have


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.moves", description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--root", type=Path, default=ROOT)
    args = parser.parse_args(argv)
    files = subprocess.run(
        ["git", "-C", str(args.root), "ls-files", "-z"], capture_output=True, text=True, check=True
    ).stdout.split("\0")
    table = Table.read(args.table, [file for file in files if file and (args.root / file).is_file()])
    for path in table.absent:
        print(f"absent: {path}")
    apply(table, args.root)
    return 0


def apply(table: Table, root: Path) -> None:
    """Raises ValueError before anything is written where a row does not fit."""
    before = {
        path: (root / path).read_text()
        for path in sorted(table.files)
        if path.endswith(TEXT) and not path.startswith(LEFT)
    }
    named = (text for path, text in before.items() if not path.startswith(HOUSE))
    words = {word for text in named for word in re.findall(r"\w+", text)}
    problems = [f"{new}, for {old}: there already" for old, new in table.names.items() if {old, new} <= words]
    texts, after = dict(before), dict[str, str]()
    for edit in table.edits:
        count = texts[edit.path].count(edit.old)
        if count != 1 and edit.path.endswith(".md"):
            print(f"{edit.path}: {count} times there: {edit.old}")
        elif count > 1 or (count == 0 and edit.new not in texts[edit.path]):
            problems.append(f"{edit.path}: {count} times there: {edit.old}")
        texts[edit.path] = texts[edit.path].replace(edit.old, edit.new)
    texts = {path: text if path.startswith(HOUSE) else table.renamed(text) for path, text in texts.items()}
    registers = {
        "features.toml": features_of,
        "house.toml": sums_of,
        "tests/durations.toml": sums_of,
        "pyproject.toml": layers_of,
    }
    for path, text in texts.items():
        try:
            if path in registers:
                after[path] = registers[path](text, table)
            else:
                after[path] = rewritten(path, text, table) if path.endswith(".py") else table.reworded(text)
        except ValueError as error:
            problems.append(str(error))
    moved = {table.new(path): after[path] for path in after if table.new(path) == path or path in table.paths}
    for merge in table.merges:
        try:
            moved[merge.target] = merged({path: after[path] for path in merge.members if path in after}, merge.doc)
        except ValueError as error:
            problems.append(f"{merge.target}:\n{error}")
    if problems:
        raise SystemExit("\n".join(problems))
    changed = [*_written(table, root, before, moved)]
    for options in (["check", "--select", "I,F401,F811,UP037", "--fix", "-q"], ["format", "-q"]):
        subprocess.run(["ruff", *options, *(path for path in changed if path.endswith(".py"))], cwd=root, check=True)


def _written(table: Table, root: Path, before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    """Write the files, and yield those that are new or other than before."""
    for old, new in table.paths.items():
        if old not in before:
            (root / new).parent.mkdir(parents=True, exist_ok=True)
            (root / old).rename(root / new)
    for path in table.files - table.after:
        (root / path).unlink(missing_ok=True)
    for path, text in sorted(after.items()):
        if before.get(path) != text:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
            yield path
    for directory, doc in sorted(table.rooms.items()):
        init = root / directory / INIT
        if init.parent.is_dir() and not init.exists():
            init.write_text(f'"""{doc}"""\n' if doc else "")
            yield f"{directory}/{INIT}"


if __name__ == "__main__":
    raise SystemExit(main())
