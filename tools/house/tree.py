"""The repository as rules read it: its Python modules, parsed once, and the lines of its C files; and what a rule is."""

import ast
import gc
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TypeVar

from tests.packages import PACKAGES

AREAS = ("product", "tests", "tools", "benchmarks")
NATIVE = (".c", ".h", ".cu")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
Node = TypeVar("Node", bound=ast.AST)


def area_of(path: str) -> str:
    """One of AREAS, or the first directory of a path that lies in none."""
    top = path.partition("/")[0]
    return "product" if top in PACKAGES else top


def directory_of(path: str) -> str:
    return str(PurePosixPath(path).parent)


@dataclass(frozen=True)
class Module:
    """A Python file. `path` is relative to the root, with slashes."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    @property
    def area(self) -> str:
        return area_of(self.path)

    @property
    def directory(self) -> str:
        return directory_of(self.path)

    @property
    def dotted(self) -> str:
        """The name by which others import it: `engine.core`, for its `__init__.py`, too."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def nodes(self, *kinds: type[Node]) -> Iterator[Node]:
        """All nodes of exactly these classes, kind by kind in the order of the text. Cheap: the module is walked once."""
        for kind in kinds:
            yield from self._index[0].get(kind, ())  # type: ignore[misc]

    @property
    def definitions(self) -> Sequence[tuple[str, Definition]]:
        """("Memory.__init__", its node) of every function and class, nested ones too, in the order of the text."""
        return self._index[1]

    @property
    def functions(self) -> Iterator[tuple[str, Function]]:
        return ((name, node) for name, node in self.definitions if not isinstance(node, ast.ClassDef))

    @property
    def classes(self) -> Iterator[tuple[str, ast.ClassDef]]:
        return ((name, node) for name, node in self.definitions if isinstance(node, ast.ClassDef))

    @property
    def docstrings(self) -> Iterator[tuple[str, str]]:
        """("Memory.__init__", what it says) of every definition that says something, and ("", ...) of the module."""
        for name, node in [("", self.tree), *self.definitions]:
            if said := ast.get_docstring(node, clean=False):
                yield name, said

    @cached_property
    def _index(self) -> tuple[Mapping[type[ast.AST], list[ast.AST]], list[tuple[str, Definition]]]:
        by_kind: defaultdict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        definitions: list[tuple[str, Definition]] = []
        todo: list[tuple[ast.AST, str]] = [(self.tree, "")]
        while todo:
            node, within = todo.pop()
            by_kind[type(node)].append(node)
            if isinstance(node, Definition):
                definitions.append((within + node.name, node))
                within += node.name + "."
            todo += [(child, within) for child in reversed([*ast.iter_child_nodes(node)]) if child._fields]
        return by_kind, definitions


@dataclass(frozen=True)
class Tree:
    """What git tracks under a root, as it is in the working tree; every file of the root where there is no git."""

    root: Path
    files: tuple[str, ...]  # all of them, sorted

    @staticmethod
    def read(root: Path, *areas: str) -> "Tree":
        """Read and parse everything, or these areas: some three seconds, many more with the garbage collector running."""
        paths = [path for path in _tracked(root) if not areas or area_of(path) in areas]
        tree, collecting = Tree(root, tuple(sorted(path for path in paths if (root / path).is_file()))), gc.isenabled()
        gc.disable()
        try:
            for module in tree.modules:
                _ = module.definitions
        finally:
            if collecting:
                gc.enable()
        return tree

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        return tuple(Module(path, self.text(path)) for path in self.files if path.endswith(".py"))

    @cached_property
    def native(self) -> Mapping[str, int]:
        """C and CUDA files and headers -> lines."""
        return {path: self.text(path).count("\n") for path in self.files if path.endswith(NATIVE)}

    def of(self, *areas: str) -> Iterator[Module]:
        """The modules of these areas."""
        return (module for module in self.modules if module.area in areas)

    def text(self, path: str) -> str:
        """Any tracked text file, "" if it is absent."""
        return (self.root / path).read_text() if (self.root / path).is_file() else ""


def _tracked(root: Path) -> list[str]:
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "-z"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    paths = (path.relative_to(root).as_posix() for path in root.rglob("*"))
    return [path for path in paths if not any(part.startswith((".", "__pycache__")) for part in path.split("/"))]


@dataclass(frozen=True)
class Rule:
    """A count that may only fall. The table `name` of house.toml holds the keys that are above what is allowed to all.

    `what` names the unit ("parameters of a constructor"), `remedy` says in one line what to do about a finding. A value up to
    `most` needs no row; nor does a key of `aims` up to its aim. `slack`: a row may be that much, or 2 %, above today's value;
    0: it is exact. `rows` is the aim of the number of rows.
    """

    name: str
    what: str
    remedy: str
    measure: Callable[[Tree], Mapping[str, int]]
    most: int = 0
    aims: Mapping[str, int] = field(default_factory=dict)
    slack: int = 0
    rows: int = 0

    def allowed(self, key: str) -> int:
        """Up to this a value needs no row."""
        return self.aims.get(key, self.most)
