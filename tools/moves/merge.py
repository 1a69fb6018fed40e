"""Several modules as one: imports in front, definitions in an order in which each finds what it needs."""

import ast
import builtins
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

from tools.moves.module import Definition, Import, bindings

WIDTH = 100


@dataclass(eq=False)
class Piece:
    """A statement of a module with the comments above it."""

    node: ast.stmt
    text: str
    needs: set[str] = field(default_factory=set)  # names that it reads when it is executed

    @property
    def names(self) -> set[str]:
        nodes = [self.node] if isinstance(self.node, Definition) else ast.walk(self.node)
        return {name for node in nodes for name in bindings(node)}


@dataclass(eq=False)
class Member:
    """A module of a merge; `text` is rewritten for the new place."""

    path: str
    doc: str
    quoted: str  # the docstring as it is written
    imports: list[Piece]
    typing: list[Piece]  # imports under `if TYPE_CHECKING:`
    pieces: list[Piece]

    @property
    def names(self) -> Mapping[str, str]:
        """Each name of the module -> what it is, as text by which two of them are the same."""
        found = {name: ast.dump(piece.node) for piece in self.pieces for name in piece.names}
        for piece in [*self.typing, *self.imports]:
            assert isinstance(piece.node, Import)
            source = piece.node.module if isinstance(piece.node, ast.ImportFrom) else "import"
            found |= {alias.asname or alias.name: f"{source} {alias.name}" for alias in piece.node.names}
        return found

    @property
    def reads(self) -> set[str]:
        return {node.id for piece in self.pieces for node in ast.walk(piece.node) if isinstance(node, ast.Name)}


def merged(texts: Mapping[str, str], doc: str) -> str:
    """One module of several: path -> text. Raises ValueError for a name that means two things."""
    members = [_member(path, text) for path, text in texts.items()]
    problems = [*_collisions(members)]
    if problems:
        raise ValueError("\n".join(problems))
    first = members[0]
    ordered = _ordered(members, texts)
    imports = [piece.text for member in members for piece in member.imports]
    runtime = {name for member in members for piece in member.imports for name in piece.names}
    typing = [textwrap.dedent(p.text) for m in members for p in m.typing if not p.names <= runtime]
    lines = [f'"""{doc}"""' if doc else first.quoted, "", *dict.fromkeys(imports)]
    if typing:
        lines += ["", "if TYPE_CHECKING:", *(textwrap.indent(text, "    ") for text in dict.fromkeys(typing))]
    given: set[Piece] = set()
    seen: set[str] = set()
    owner = {piece: member for member in members for piece in member.pieces}
    headed = {first} if not doc and ordered[0] is first else set()
    for piece in _placed([piece for member in ordered for piece in member.pieces]):
        same = ast.dump(piece.node)
        if piece in given or (piece.names and same in seen and not isinstance(piece.node, ast.If | ast.For)):
            continue
        given.add(piece)
        seen.add(same)
        if owner[piece] not in headed:
            headed.add(owner[piece])
            lines += ["", "", _heading(owner[piece], first if not doc else None), ""]
        lines += [piece.text]
    return "\n".join(lines) + "\n"


def _member(path: str, text: str) -> Member:
    tree, lines = ast.parse(text, path), text.splitlines()
    member, at = Member(path, ast.get_docstring(tree, clean=False) or "", "", [], [], []), 0
    for number, node in enumerate(tree.body):
        end = node.end_lineno or 0
        if number == len(tree.body) - 1:
            end = len(lines)
        segment, at = "\n".join(lines[at:end]), end
        if number == 0 and member.doc:
            member.quoted = segment.strip("\n")
            continue
        if isinstance(node, Import):
            member.imports.append(Piece(node, segment.strip("\n")))
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            member.typing += [Piece(part, ast.unparse(part)) for part in node.body if isinstance(part, Import)]
        else:
            member.pieces.append(Piece(node, segment if member.pieces else segment.strip("\n"), _eager(node)))
    return member


def _eager(node: ast.AST) -> set[str]:
    """Names that a statement reads when it is executed: of a function its decorators, defaults and annotations."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        parts = [*node.decorator_list, node.args, *([node.returns] if node.returns else [])]
    elif isinstance(node, ast.Lambda):
        parts = [node.args]
    else:
        parts = [*ast.iter_child_nodes(node)]
    own = {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else set()
    return own.union(*map(_eager, parts)) if parts else own


def _calls(node: ast.AST) -> set[str]:
    """Names of functions that a statement calls when it is executed."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set().union(*(_calls(part) for part in node.decorator_list)) if node.decorator_list else set()
    own = {node.func.id} if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else set()
    return own.union(*map(_calls, ast.iter_child_nodes(node)))


def _collisions(members: Sequence[Member]) -> Iterator[str]:
    for number, member in enumerate(members):
        for other in members[:number]:
            for name in sorted(member.names.keys() & other.names.keys()):
                if member.names[name] != other.names[name]:
                    yield f"{name}: in {other.path} and in {member.path}"
        for name in sorted(member.names.keys() & vars(builtins).keys()):
            for other in members:
                if other is not member and name in other.reads and name not in other.names:
                    yield f"{name}: in {member.path}, and Python's in {other.path}"


def _ordered(members: Sequence[Member], texts: Mapping[str, str]) -> list[Member]:
    """What others need comes first; otherwise as in the table."""
    needs = {
        member: [o for o in members if o is not member and member.reads & (o.names.keys() - member.names.keys())]
        for member in members
    }
    sorter = TopologicalSorter(needs)
    try:
        sorter.prepare()
    except CycleError:
        return [*members]
    order: list[Member] = []
    while sorter.is_active():
        ready = [*order, *sorter.get_ready()]
        done = [member for member in ready if member not in order]
        order += sorted(done, key=members.index)
        sorter.done(*done)
    return order


def _placed(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """In this order, but what a statement reads as it is executed before it."""
    by_name = {name: piece for piece in reversed(pieces) for name in piece.names}
    given: set[Piece] = set()

    def place(piece: Piece) -> Iterator[Piece]:
        if piece in given:
            return
        given.add(piece)
        called = [by_name[name].node for name in _calls(piece.node) if name in by_name]
        inside = {node.id for function in called for node in ast.walk(function) if isinstance(node, ast.Name)}
        for name in sorted(
            piece.needs | inside, key=lambda name: pieces.index(by_name[name]) if name in by_name else -1
        ):
            if name in by_name:
                yield from place(by_name[name])
        yield piece

    for piece in pieces:
        yield from place(piece)


def _heading(member: Member, first: Member | None) -> str:
    """The docstring of a module as a comment above its part of another."""
    if member is first:
        return "# ---- " + PurePosixPath(member.path).stem.replace("_", " ").strip()
    title, *rest = textwrap.dedent(member.doc).strip().split("\n") or [""]
    lines = [*textwrap.wrap("---- " + title, WIDTH - 2)]
    for line in rest:
        lines += [line] if len(line) <= WIDTH - 2 or "  " in line.strip() else textwrap.wrap(line, WIDTH - 2)
    return "\n".join(f"# {line}".rstrip() for line in lines)
