"""The ratchet: what rules measure against house.toml, whose rows only fall, unless a row says why it rises."""

import subprocess
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.house.tree import Rule, Tree, area_of

FILE = "house.toml"
LINES = "lines"  # the table whose raises name a commit that removed as much
TIGHTEN = "make house-tighten"
HEADER = f"""\
# What the repository may grow to: `make lint` fails above a row, and where a row could be lower (`{TIGHTEN}` lowers it).
# A row that rises, or is new, says why, unless other rows of its table and area fall by as much in the same change:
#   "engine/core" = {{ limit = 5200, because = "...", issue = 39 }}
#   "engine/core" = {{ limit = 5200, because = "...", instead_of = "COMMIT" }}     which removed as many lines
# One row a line, sorted. After a move of files change the paths here, too; on a conflict take either side and tighten.
"""


@dataclass(frozen=True)
class Row:
    """A line of house.toml."""

    limit: int
    because: str = ""
    instead_of: str = ""
    issue: int = 0

    @property
    def reason(self) -> tuple[str, str, int]:
        return self.because, self.instead_of, self.issue

    @property
    def is_paid(self) -> bool:
        """Whether it names what allows it to rise."""
        return bool(self.because and (self.instead_of or self.issue))

    def __str__(self) -> str:
        if not self.because:
            return str(self.limit)
        source = f"issue = {self.issue}" if self.issue else f'instead_of = "{self.instead_of}"'
        return f'{{ limit = {self.limit}, because = "{self.because}", {source} }}'


Table = Mapping[str, Row]


def parse(text: str) -> dict[str, dict[str, Row]]:
    """The tables of house.toml. Raises TypeError for a row with other fields."""
    return {
        name: {key: Row(**row) if isinstance(row, dict) else Row(row) for key, row in table.items()}
        for name, table in tomllib.loads(text).items()
    }


def dump(rules: Iterable[Rule], tables: Mapping[str, Table]) -> str:
    """house.toml with these rows, in the one form that it has."""
    lines = [HEADER]
    for rule in rules:
        aims = ", ".join(f"{key} {aim}" for key, aim in rule.aims.items())
        lines += [f"# {rule.what}" + (f"; aims: {aims}" if aims else ""), f"[{rule.name}]"]
        lines += [f'"{key}" = {row}' for key, row in sorted(tables.get(rule.name, {}).items())]
        lines.append("")
    return "\n".join(lines)


def limit_of(rule: Rule, table: Table, key: str) -> int:
    """What a value may be."""
    return table[key].limit if key in table else rule.allowed(key)


def above(rule: Rule, values: Mapping[str, int]) -> dict[str, int]:
    """What needs a row."""
    return {key: value for key, value in sorted(values.items()) if value > rule.allowed(key)}


def findings(rule: Rule, values: Mapping[str, int], table: Table) -> Iterator[str]:
    """What grew, and rows that allow more than today's tree needs."""
    needed = above(rule, values)
    for key, value in needed.items():
        limit = limit_of(rule, table, key)
        if value > limit:
            yield f"{key}: {value} {rule.what}, at most {limit}: {rule.remedy}"
    loose = [key for key, row in sorted(table.items()) if row.limit > _loosest(rule, needed.get(key, 0))]
    if loose:
        more = f" and {len(loose) - 3} more" if len(loose) > 3 else ""
        yield f"[{rule.name}] allows more than the tree needs: {', '.join(loose[:3])}{more}: {TIGHTEN}"


def _loosest(rule: Rule, value: int) -> int:
    return value + (max(rule.slack, value // 50) if rule.slack and value else 0)


def tightened(rule: Rule, values: Mapping[str, int], table: Table | None) -> dict[str, Row]:
    """The table with lower rows; None: a new one, at today's values. The row of a file that moved goes with it."""
    needed = above(rule, values)
    grains = {key: max(1, rule.slack // 2, rule.slack and value // 200) for key, value in needed.items()}
    todays = {key: Row(-(-value // grains[key]) * grains[key]) for key, value in needed.items()}
    if table is None:
        return todays
    kept = {key: row for key, row in table.items() if key in needed}
    gone = {key.rpartition("/")[2]: row for key, row in table.items() if key not in needed}
    for key in needed.keys() - kept.keys():
        moved = gone.pop(key.rpartition("/")[2], None)
        if moved is not None and moved.limit >= needed[key]:
            kept[key] = moved
    for key, row in kept.items():
        if row.limit > _loosest(rule, needed[key]):
            kept[key] = replace(row, limit=todays[key].limit)
    return kept


# ---- raises


@dataclass(frozen=True)
class Change:
    """house.toml before and after a commit, or before and after what is not committed yet."""

    name: str
    before: Mapping[str, Table]
    after: Mapping[str, Table]

    def unpaid(self, rules: Iterable[Rule], root: Path) -> Iterator[str]:
        """Rows that rise without a reason, in tables that were there before."""
        for rule in rules:
            if rule.name not in self.before:
                continue
            old, new = self.before[rule.name], self.after.get(rule.name, {})
            change = {key: limit_of(rule, new, key) - limit_of(rule, old, key) for key in {*old, *new}}
            balance = Counter[str]()
            for key, by in change.items():
                balance[area_of(key)] += by
            for key, by in sorted(change.items()):
                if key in new and by > 0 and balance[area_of(key)] > 0:
                    problem = _problem(new[key], old.get(key), by if rule.name == LINES else 1, root)
                    if problem:
                        yield f'{self.name} raises [{rule.name}] "{key}" by {by}: {problem}'


def _problem(new: Row, old: Row | None, by: int, root: Path) -> str:
    """Why this row may not rise; "" if it may."""
    if not new.is_paid or (old is not None and new.reason == old.reason):
        return 'the row needs because = "..." and issue = N or instead_of = "COMMIT", or as much less beside it'
    if new.instead_of and not new.issue:
        counts = _git(root, "show", "--numstat", "--format=", new.instead_of)
        if counts is None:
            return f"git has no commit {new.instead_of}"
        rows = [line.split("\t") for line in counts.splitlines() if line and line[0] != "-"]
        removed = sum(int(row[1]) - int(row[0]) for row in rows)
        if removed < by:
            return f"{new.instead_of} removed {removed} lines only"
    return ""


def changes(root: Path, now: Mapping[str, Table]) -> Sequence[Change] | None:
    """The last committed change of house.toml and the one in the working tree; None: git does not know what was before."""
    last = _git(root, "log", "-1", "--format=%h", "--", FILE)
    commits = (last or "").split()
    if last is None or any(_git(root, "rev-parse", "--verify", f"{commit}^") is None for commit in commits):
        return None
    uncommitted = Change("the working tree", _at(root, "HEAD"), now)
    return [*(Change(commit, _at(root, f"{commit}^"), _at(root, commit)) for commit in commits), uncommitted]


def _at(root: Path, revision: str) -> dict[str, dict[str, Row]]:
    return parse(_git(root, "show", f"{revision}:{FILE}") or "")


def _git(root: Path, *args: str) -> str | None:
    done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def check(rules: Collection[Rule], measured: Mapping[str, Mapping[str, int]], root: Path) -> list[str]:
    """All findings."""
    text = (root / FILE).read_text()
    tables = parse(text)
    found = [f"[{name}] is a table of no rule" for name in tables if name not in {rule.name for rule in rules}]
    for rule in rules:
        found += findings(rule, measured[rule.name], tables.get(rule.name, {}))
    if not found and text != dump(rules, tables):
        found.append(f"{FILE} is not in its one form, which merges well: {TIGHTEN}")
    history = changes(root, tables)
    if history is None:
        print("no git history here: raises of house.toml are not compared")
    for change in history or ():
        found += change.unpaid(rules, root)
    return found


# ---- files that a plain streamed chat enters
# A test of the suite starts a cluster, measures and compares (tests/house/test_plain_chat.py), as no reading of the source can.
# `make lint` shows the limits, which a row that rises must explain, and takes them for the values of today.

ALL, HAND_OVER = "files", "files of the hand-over"
AIMS: Mapping[str, int] = tomllib.loads(Path(__file__).with_name("rules.toml").read_text())["plain_chat"]["aims"]


def plain_chat(tree: Tree) -> Mapping[str, int]:
    return plain_chat_in(tree.text(FILE))


def plain_chat_in(text: str) -> Mapping[str, int]:
    """What house.toml, its text, allows."""
    table = parse(text).get("plain_chat", {})
    return {key: table[key].limit if key in table else aim for key, aim in AIMS.items()}
