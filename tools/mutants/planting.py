"""Bugs that can be planted: rows of the tables beside this file, each a change of one function of the product.

`at` names a file and the function. What is changed there, in this order:

    old, new      text of the function, which stands there `times` (once), and what stands there instead; or lists of both
    result        what is returned in place of each `result`
    body          statements in place of all
    first, last   statements before and behind them

`same_as = "table/name"`: the change of another row. A row that no longer fits the product raises `OutOfDate`.
"""

import ast
import builtins
import dis
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# What `make mutants` and `make sim-mutants` plant, by the files that hold it.
TABLES = {
    "core": ("core", "drafts", "images"),
    "cluster": ("cluster", "ranks", "image_sharing"),
    **{
        name: (name,)
        for name in (
            "encoders",
            "drafters",
            "experts",
            "states",
            "rewinds",
            "ways",
            "prefixes",
            "checksums",
            "stores",
            "whole",
            "conversations",
        )
    },
}
_BLAMED = re.compile(
    r"(?<!'NoneType' object )(?:has no attribute|local variable) '(\w+)'|(\w+)\(\) (?:takes|missing|got an unexpected)"
)


class OutOfDate(Exception):
    """The product has changed: the bug says nothing any more."""


@dataclass(frozen=True)
class Bug:
    """`what`: one sentence. `change`: the row, whose keys the module explains."""

    name: str
    what: str
    change: Mapping[str, Any]

    def plant(self) -> None:
        """Put the bug into the modules that this process is going to import. Nothing takes it out again."""
        path, _ = self._place
        name = path.removesuffix(".py").replace("/", ".")
        assert name not in sys.modules, f"{name} is there already, without the bug"
        sys.meta_path.insert(0, _Planted(name, str(ROOT / path), self.code()))

    def code(self) -> CodeType:
        """Return the module with the bug in it. Raises `OutOfDate`."""
        path, function = self._place
        text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        node = _function(ast.parse(text), function)
        if node is None:
            raise OutOfDate(f"{self.name}: no {function} in {path}")
        lines = text.splitlines(keepends=True)
        block = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
        lines[node.lineno - 1 : node.end_lineno] = [textwrap.indent(self._changed(block), " " * node.col_offset), "\n"]
        code = compile("".join(lines), str(ROOT / path), "exec", dont_inherit=True)
        unknown = set(_globals(code)) - set(_stored(code)) - vars(builtins).keys() - {"__file__"}
        used = set(re.findall(r"\bself\.(\w+)", self._own)) - set(re.findall(r"\bself\.(\w+) = ", self._own))
        unknown |= {name for name in used if not re.search(rf"\b{name}\b", text)}
        if unknown:
            raise OutOfDate(f"{self.name}: {path} knows no {', '.join(sorted(unknown))}")
        return code

    def explains(self, error: str) -> bool:
        """Whether `error` speaks of a name that the bug's own lines use: then they are out of date, and nothing was found."""
        blamed = [name for names in _BLAMED.findall(error) for name in names if name]
        return any(re.search(rf"\b{name}\b", self._own) for name in blamed)

    @property
    def _own(self) -> str:
        """Its own lines."""
        return "\n".join(str(self.change.get(key, "")) for key in ("new", "result", "body", "first", "last"))

    @property
    def _place(self) -> tuple[str, str]:
        path, _, function = self.change["at"].partition(" ")
        return path, function

    def _changed(self, block: str) -> str:
        change = self.change
        for old, new in zip(_listed(change.get("old", [])), _listed(change.get("new", [])), strict=True):
            if block.count(old) != change.get("times", 1):
                raise OutOfDate(f"{self.name}: {block.count(old)} times {old!r} in {change['at']}")
            block = block.replace(old, new)
        node = ast.parse(block).body[0]
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for returned in _returns(node) if "result" in change else ():
            call = ast.parse(f"(lambda result: ({change['result']}))(None)", mode="eval").body
            assert isinstance(call, ast.Call)
            call.args = [returned.value or call.args[0]]
            returned.value = call
        own = _statements(change["body"]) if "body" in change else node.body
        node.body = [*_statements(change.get("first", "")), *own, *_statements(change.get("last", ""))]
        return ast.unparse(node)


def bugs_of(table: str) -> dict[str, Bug]:
    """All bugs of one of `TABLES`, by name."""
    found: dict[str, Bug] = {}
    for file in TABLES[table]:
        for name, row in _rows(file).items():
            assert name not in found, f"two bugs are called {name!r}"
            other, _, there = row.get("same_as", "").partition("/")
            found[name] = Bug(name, row["what"], _rows(other)[there] if other else row)
    return found


def finders_of(table: str) -> list[str]:
    """Return the tests that must find the bugs; none: stories or simulated clusters must."""
    return [path for file in TABLES[table] for path in _read(file).get("finders", [])]


def _rows(file: str) -> dict[str, dict[str, Any]]:
    return {name: row for name, row in _read(file).items() if name != "finders"}


def _read(file: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(f"{file}.toml").read_text())


class _Planted(SourceFileLoader):
    """A finder and the loader of one module, whose code is given."""

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        return self._code


def _function(node: Any, name: str) -> Any:
    for part in name.split("."):
        node = next((one for one in getattr(node, "body", ()) if getattr(one, "name", None) == part), None)
    return node


def _returns(node: ast.AST) -> Iterator[ast.Return]:
    """Its own, not those of functions inside."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return):
            yield child
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _returns(child)


def _statements(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _globals(code: CodeType) -> Iterator[str]:
    """The names that functions of a module look up in it."""
    yield from (one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner)


def _stored(code: CodeType) -> Iterator[str]:
    yield from (one.argval for one in dis.get_instructions(code) if one.opname == "STORE_NAME")
