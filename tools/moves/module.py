"""One Python file under a table: its imports lead to the new modules, and so do names and paths in its text."""

import ast
import re
from collections import Counter
from collections.abc import Iterator

from tools.moves.table import Table, dotted

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Import = ast.Import | ast.ImportFrom


def rewritten(path: str, text: str, table: Table) -> str:
    """The text of a file for its new place. Raises ValueError where a name cannot follow."""
    return _Rewrite(path, text, table).text()


def bindings(node: ast.AST) -> Iterator[str]:
    """Names that a node binds, apart from those inside it."""
    if isinstance(node, Definition):
        yield node.name
    elif isinstance(node, Import):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name


class _Rewrite:
    """Collects pieces of the text to replace: (start, end) in characters -> new text."""

    def __init__(self, path: str, text: str, table: Table) -> None:
        self._path, self._text, self._table = path, text, table
        self._tree = ast.parse(text, path)
        self._nodes = [*ast.walk(self._tree)]
        self._old, self._new = dotted(path), dotted(table.new(path))
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._edits: dict[tuple[int, int], str] = {}
        self._bound = Counter(name for node in self._nodes for name in bindings(node))
        imports = (node for node in self._nodes if isinstance(node, ast.ImportFrom))
        self._imported = Counter(
            (alias.asname or alias.name, self._goal(node, alias)) for node in imports for alias in node.names
        )

    def text(self) -> str:
        for old, new in self._table.symbols.get(self._old, {}).items():
            self._rename_definition(old, new)
        for body in _bodies(self._nodes):
            gone = [node for node in body if isinstance(node, ast.ImportFrom) and self._import(node)]
            if len(gone) == len(body) and gone and body is not self._tree.body:
                self._edits[self._span(gone[0])] = "pass"
        pieces, at = [], 0
        for (start, end), new in sorted(self._edits.items()):
            if start >= at:
                pieces += [self._table.reworded(self._text[at:start]), new]
                at = end
        text = "".join([*pieces, self._table.reworded(self._text[at:])])
        return _at_depth(text, self._table.new(self._path).count("/") - self._path.count("/"))

    # ---- imports

    def _goal(self, node: ast.ImportFrom, alias: ast.alias) -> str:
        """What is imported, by its dotted name afterwards."""
        full = f"{node.module}.{alias.name}"
        if full in self._table.modules:
            return self._table.modules[full]
        name = self._table.symbols.get(node.module or "", {}).get(alias.name, alias.name)
        return f"{self._table.modules.get(node.module or '', node.module)}.{name}"

    def _import(self, node: ast.ImportFrom) -> bool:
        """Write the statement anew if it changes; True: nothing is left of it."""
        by_source: dict[str, dict[str, None]] = {}
        for alias in node.names:
            full, goal = f"{node.module}.{alias.name}", self._goal(node, alias)
            local, (source, _, name) = alias.asname or alias.name, goal.rpartition(".")
            is_module = full in self._table.modules
            own = goal if is_module else source
            if (own == self._new and self._new not in (full, node.module)) or own == self._new != self._old:
                self._inline(local, full) if is_module else self._rename(local, name, goal, must=True)
                continue
            if is_module:
                self._rename_attributes(local, full)
            kept = alias.asname if alias.asname else name if self._rename(local, name, goal) else local
            by_source.setdefault(source, {})[name if kept == name else f"{name} as {kept}"] = None
        lines = [f"from {source} import {', '.join(names)}" for source, names in by_source.items()]
        before = [f"from {node.module} import {', '.join(dict.fromkeys(map(_spelled, node.names)))}"]
        if lines != before:
            self._edits[self._span(node)] = ("\n" + " " * node.col_offset).join(lines)
        return not lines

    def _inline(self, local: str, module: str) -> None:
        """A module that becomes part of this one: `local.name` is `name`."""
        renamed = self._table.symbols.get(module, {})
        for node in self._attributes(local):
            self._edits[self._span(node)] = renamed.get(node.attr, node.attr)
            assert self._bound[node.attr] == 0, f"{self._path}: {local}.{node.attr} beside another {node.attr}"

    def _rename_attributes(self, local: str, module: str) -> None:
        renamed = self._table.symbols.get(module, {})
        for node in self._attributes(local):
            if node.attr in renamed:
                end = self._span(node)[1]
                self._edits[end - len(node.attr), end] = renamed[node.attr]

    def _attributes(self, local: str) -> Iterator[ast.Attribute]:
        for node in self._nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == local:
                yield node

    # ---- names

    def _rename_definition(self, old: str, new: str) -> None:
        own = sum(name == old for node in _shallow(self._tree) for name in bindings(node))
        if own != self._bound[old] or self._bound[new] or not self._rename_uses(old, new):
            raise ValueError(f"{self._path}: {old} cannot become {new}: the name has another meaning, too")
        for node in self._tree.body:
            if isinstance(node, Definition) and node.name == old:
                start = self._starts[node.lineno - 1]
                start += re.match(r"(async )?(def|class) ", self._text[start:]).end()  # type: ignore[union-attr]
                self._edits[start, start + len(old)] = new

    def _rename(self, local: str, name: str, goal: str, must: bool = False) -> bool:
        """Write `name` where the imported `local` stands; False: one of them is bound otherwise, too."""
        if local == name:
            return True
        free = self._bound[local] == self._imported[local, goal] and self._bound[name] == self._imported[name, goal]
        if free and self._rename_uses(local, name):
            return True
        if must:
            raise ValueError(f"{self._path}: {local} cannot become {name}: one of them has another meaning, too")
        return False

    def _rename_uses(self, old: str, new: str) -> bool:
        nodes = [node for node in self._nodes if isinstance(node, ast.Name) and node.id == old]
        spans = [(start, start + len(old)) for start, _ in map(self._span, nodes)]
        if any(self._text[start:end] != old for start, end in spans):  # inside an f-string, where columns are wrong
            return False
        self._edits.update(dict.fromkeys(spans, new))
        return True

    # ---- positions

    def _span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column: int) -> int:
        """In characters, of a position as `ast` gives it: columns are bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode(errors="replace"))


def _spelled(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def _bodies(nodes: list[ast.AST]) -> Iterator[list[ast.stmt]]:
    for node in nodes:
        for name in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, name, None), list):
                yield body


def _shallow(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes of a module that are in no function and no class."""
    todo: list[ast.AST] = [*tree.body]
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, Definition | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            todo += ast.iter_child_nodes(node)


def _at_depth(text: str, deeper: int) -> str:
    """`Path(__file__).parents[n]` of a file that lies so many directories deeper."""
    pattern = re.compile(r"(\(__file__\)(?:\.resolve\(\))?\.parents\[)(\d)(\])")
    return pattern.sub(lambda match: f"{match[1]}{int(match[2]) + deeper}{match[3]}", text)
