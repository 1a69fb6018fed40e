"""The table of moves: which file lies where afterwards, and what that makes of names and paths."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

INIT = "__init__.py"
_END_OF_PATH = re.compile(r"(?<![\w./-])(?:[\w-]+/)*[\w-]+\.(?:py|c|h)\b")


@dataclass(frozen=True)
class Merge:
    """Modules that become one. `members`: paths today, the first one gives the docstring unless `doc` does.

    `rename`: {member: {top-level name: its new name}}, for names that several members have.
    """

    target: str
    members: tuple[str, ...]
    doc: str = ""
    rename: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Edit:
    """A text of one file, named by its path today, that stands there exactly once."""

    path: str
    old: str
    new: str


def dotted(path: str) -> str:
    """The name by which others import a Python file."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class Table:
    """Rows that hold for the files of one tree. A row whose files are absent is left out; `absent` names them."""

    files: frozenset[str]
    paths: Mapping[str, str]  # old -> new, of every file that moves or is merged
    merges: Sequence[Merge]  # of two modules or more that are there
    rooms: Mapping[str, str]  # new directory -> docstring of its `__init__.py`
    edits: Sequence[Edit]
    names: Mapping[str, str]  # identifiers, which mean one thing wherever they stand
    absent: Sequence[str]

    @staticmethod
    def read(path: Path, files: Iterable[str]) -> "Table":
        """Raises ValueError for rows that contradict each other."""
        rows, there = tomllib.loads(path.read_text()), frozenset(files)
        paths: dict[str, str] = {}
        merges: list[Merge] = []
        absent: list[str] = []

        def move(old: str, new: str) -> None:
            if old in paths:
                raise ValueError(f"{old}: two rows")
            paths[old] = new

        moves = [*rows.get("move", {}).items()]
        for directory, names in rows.get("into", {}).items():
            sources = [_member(directory, name) for name in names]
            moves += [(source, f"{directory}/{PurePosixPath(source).name}") for source in sources]
        for old, new in moves:
            found = sorted(file for file in there if file == old or file.startswith(old + "/"))
            absent += [] if found else [old]
            for file in found:
                goal = new + file.removeprefix(old)
                if not goal.endswith(INIT) or (goal not in there and goal not in paths.values()):
                    move(file, goal)
        for target, row in rows.get("merge", {}).items():
            row = row if isinstance(row, dict) else {"from": row}
            members = {name: _member(target, name) for name in row["from"]}
            absent += [file for file in members.values() if file not in there]
            present = tuple(file for file in members.values() if file in there)
            rename = {members[name]: names for name, names in row.get("rename", {}).items()}
            for file in present:
                move(file, target)
            if present and target in there and target not in present:
                raise ValueError(f"{target}: there already, and not of its row")
            if len(present) > 1:
                merges.append(Merge(target, present, row.get("doc", ""), rename))
        edits = [Edit(*row) for row in rows.get("edit", {}).get("rows", []) if row[0] in there]
        table = Table(there, paths, merges, rows.get("room", {}), edits, rows.get("name", {}), absent)
        table._check()
        return table

    def _check(self) -> None:
        merged = {merge.target for merge in self.merges}
        for name in self.names:
            if not re.search(r".[_A-Z]|_.", name) or f"{name}.py" in {PurePosixPath(file).name for file in self.files}:
                raise ValueError(f"{name}: a word of English, or a module's name")
        for old, new in self.paths.items():
            taken = new in self.files and self.paths.get(new, new) == new and new != old and new not in merged
            if taken or (new not in merged and list(self.paths.values()).count(new) > 1):
                raise ValueError(f"{old} -> {new}: there is such a file")

    def new(self, path: str) -> str:
        return self.paths.get(path, path)

    @cached_property
    def emptied(self) -> frozenset[str]:
        """Directories that lose all files but their `__init__.py`. One may be a module afterwards."""
        sources = {str(PurePosixPath(path).parent) for path in self.paths}
        stay = (path for path in map(self.new, self.files) if not path.endswith(INIT))
        return frozenset(sources - {str(parent) for path in stay for parent in PurePosixPath(path).parents})

    @cached_property
    def after(self) -> frozenset[str]:
        """All files of the tree afterwards, apart from each `__init__.py` that comes."""
        return frozenset(map(self.new, self.files)) - {f"{directory}/{INIT}" for directory in self.emptied}

    @cached_property
    def modules(self) -> Mapping[str, str]:
        """Dotted name today -> dotted name afterwards, of every Python file."""
        return {dotted(path): dotted(self.new(path)) for path in self.files if path.endswith(".py")}

    @cached_property
    def symbols(self) -> Mapping[str, Mapping[str, str]]:
        """Dotted name of a module today -> {top-level name: its name afterwards}."""
        renamed = (item for merge in self.merges for item in merge.rename.items())
        return {dotted(path): names for path, names in renamed}

    @cached_property
    def _words(self) -> Mapping[str, str]:
        """What stands for a file in text: its path, its dotted name, its path without ".py"; old -> new."""
        words = dict(self.paths)
        for old, new in self.paths.items():
            if old.endswith(".py") and new.endswith(".py"):
                words |= {dotted(old): dotted(new), old.removesuffix(".py"): new.removesuffix(".py")}
        return words | self._directories

    @cached_property
    def _directories(self) -> Mapping[str, str]:
        """Directories of which everything goes to one other; old -> new."""
        goals: dict[str, set[str]] = {}
        for file in self.files:
            directory = str(PurePosixPath(file).parent)
            if self.new(file) in self.after and f"{directory}.py" not in self.after:
                goals.setdefault(directory, set()).add(str(PurePosixPath(self.new(file)).parent))
        whole = {old: goal.pop() for old, goal in goals.items() if len(goal) == 1}
        moved = {old: new for old, new in whole.items() if old != new}
        return moved | {old.replace("/", "."): new.replace("/", ".") for old, new in moved.items()}

    def renamed(self, text: str) -> str:
        """`text` with the new identifiers, in strings and comments, too."""
        return self._identifier.sub(lambda match: self.names[match[0]], text) if self.names else text

    @cached_property
    def _identifier(self) -> re.Pattern[str]:
        return re.compile(rf"(?<!\w)(?:{'|'.join(self.names)})(?!\w)")

    @cached_property
    def _mention(self) -> re.Pattern[str]:
        tops = "|".join(sorted({file.partition("/")[0] for file in self.paths}))
        return re.compile(rf"(?<![\w./-])(?:{tops})(?:(?:\.\w+)+|(?:/[\w.-]+)+)") if tops else re.compile(r"(?!)")

    def reworded(self, text: str) -> str:
        """`text` with the new paths and dotted names in place of the old ones, and the ends of paths that name one file."""
        text = self._mention.sub(lambda match: self._word(match[0]), text)
        return _END_OF_PATH.sub(lambda match: self._ends.get(match[0], match[0]), text)

    @cached_property
    def _ends(self) -> Mapping[str, str]:
        """Ends of paths that no other file has, "policy.py" and "core/policy.py", where they change; old -> new."""
        found: dict[str, str] = {}
        for path in self.files:
            parts, new = path.split("/"), self.new(path).split("/")
            for count in range(1, len(parts)):
                end = "/".join(parts[-count:])
                found[end] = "" if end in found else "/".join(new[-count:])
        return {old: new for old, new in found.items() if new and new != old}

    def _word(self, word: str) -> str:
        separator = "/" if "/" in word else "."
        head, tail = word, ""
        while head:
            if head in self._words and not (tail and separator == "/" and tail[0] == "." and tail[1:2].isalnum()):
                return self._words[head] + tail
            cut = max(head.rfind(separator), head.rfind(".") if separator == "/" else -1)
            head, tail = head[: max(cut, 0)], head[max(cut, 0) :] + tail
        return word


def _member(target: str, name: str) -> str:
    return name if "/" in name else str(PurePosixPath(target).with_name(name + ".py"))
