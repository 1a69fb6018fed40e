"""Files that list other files by patterns or in tables of their own."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from tools.moves.table import Table

LIST = re.compile(r"^(base|rooms|tests)( = )\[(.*?)\]", re.M | re.S)
ROW = re.compile(r'^"(?P<key>[^"]+)" = (?P<open>\{ limit = )?(?P<limit>[\d.]+)(?P<rest>.*)$')
CONTRACT = re.compile(r'(containers = \["([\w.]+)"\]\n(?:\w+ = \w+\n)*layers = \[)(.*?)(\n?\])', re.S)
QUOTED = re.compile(r'"([^"]*)"')


def features_of(text: str, table: Table) -> str:
    """features.toml: each pattern matches afterwards what its files became, and nothing else."""

    def listed(match: re.Match[str]) -> str:
        name, patterns = match[1], QUOTED.findall(match[3])
        new = _base(patterns, table) if name == "base" else _exact(patterns, table)
        line = f"{name} = [" + ", ".join(f'"{pattern}"' for pattern in new) + "]"
        if len(line) <= 120:
            return line
        body = textwrap.wrap(", ".join(f'"{pattern}"' for pattern in new) + ",", 116, break_on_hyphens=False)
        return f"{name} = [\n" + "".join(f"    {part}\n" for part in body) + "]"

    return LIST.sub(listed, text)


def _matches(pattern: str, files: Iterable[str]) -> set[str]:
    """As in tools/house/register.py: "a/" is all below a directory, "*" a part of one name."""
    form = re.compile(re.escape(pattern).replace(r"\*", "[^/]*") + (".*" if pattern.endswith("/") else ""))
    return {file for file in files if form.fullmatch(file)}


def _exact(patterns: Sequence[str], table: Table) -> list[str]:
    found: dict[str, None] = {}
    for pattern in patterns:
        goal = {table.new(file) for file in _matches(pattern, table.files)} & table.after
        directories = {str(PurePosixPath(file).parent) for file in goal}
        candidates = [pattern, table.reworded(pattern.rstrip("/")) + "/" * pattern.endswith("/")]
        candidates += [f"{directory}/{PurePosixPath(pattern).name}" for directory in directories if "*" in pattern]
        fits = [candidate for candidate in candidates if _matches(candidate, table.after) == goal]
        covered = set().union(*(_matches(other, table.after) for other in found)) if found else set()
        found |= dict.fromkeys(fits[:1] or sorted(goal - covered))
    covers = {pattern: _matches(pattern, table.after) for pattern in found}
    return [
        pattern for pattern in found if not any(pattern != other and covers[pattern] < covers[other] for other in found)
    ]


def _base(patterns: Sequence[str], table: Table) -> list[str]:
    new = [pattern for pattern in dict.fromkeys(patterns) if _matches(pattern, table.after)]
    goal = {table.new(file) for pattern in patterns for file in _matches(pattern, table.files)} & table.after
    left = goal - set().union(*(_matches(pattern, table.after) for pattern in new))
    return new + sorted({f"{PurePosixPath(file).parent}/" for file in left})


def sums_of(text: str, table: Table) -> str:
    """house.toml, durations.toml: rows go with their files, and are summed where they meet. Rows of directories: tighten, pay."""
    lines: list[str] = []
    at: dict[str, int] = {}
    for line in table.reworded(text).split("\n"):
        row = ROW.match(line)
        if line.startswith("["):
            at.clear()
        if row and (number := at.get(row["key"])) is not None:
            other = ROW.match(lines[number])
            assert other is not None
            limit = (
                f"{float(other['limit']) + float(row['limit']):.1f}"
                if "." in row["limit"]
                else int(other["limit"]) + int(row["limit"])
            )
            form = other if other["open"] else row  # the one that says why
            lines[number] = f'"{row["key"]}" = {form["open"] or ""}{limit}{form["rest"]}'
            continue
        if row:
            at[row["key"]] = len(lines)
        lines.append(line)
    return "\n".join(lines)


def layers_of(text: str, table: Table) -> str:
    """pyproject.toml: layers of import contracts name modules relative to their package."""

    def contract(match: re.Match[str]) -> str:
        package = match[2]
        gone = {old.replace("/", ".") for old in table.emptied if f"{old}.py" not in table.after}
        names = {old.rpartition(".")[2]: new for old, new in table.modules.items() if old.rpartition(".")[0] == package}
        own = {name for quoted in QUOTED.findall(match[3]) for name in quoted.split(" | ")}
        seen: set[str] = set()

        def layer(quoted: re.Match[str]) -> str:
            kept: dict[str, None] = {}
            for name in quoted[1].split(" | "):
                source, _, new = names.get(name, f"{package}.{name}").rpartition(".")
                if f"{source}.{new}" in gone:
                    continue
                if source == package and new not in seen and (new == name or new not in own):
                    kept[new] = None
            seen.update(kept)
            return f'"{" | ".join(kept)}"'

        layers = QUOTED.sub(layer, match[3])
        return match[1] + re.sub(r'""\s*(,\s*|$)', "", layers) + match[4]

    return table.reworded(CONTRACT.sub(contract, text))
