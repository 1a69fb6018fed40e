"""Width of seams: parameters, imports, fields, length of functions; branches on None in the files of one step."""

import ast
from collections.abc import Callable, Iterator, Mapping

from tools.house.tree import AREAS, Function, Module, Tree

# The files that every step of a plain request goes through: no name of a feature, few branches on None.
BASE_PATH = (
    *(f"engine/core/{name}.py" for name in ("scheduler", "memory", "state", "results")),
    *(f"engine/core/{name}.py" for name in ("prefill_planning", "decode_planning")),
    "engine/loop/loop.py",
    "engine/executor/passes.py",
    *(f"engine/models/{name}.py" for name in ("decoder", "layer", "part")),
    *("disagg/role.py", "disagg/decode_role.py", "disagg/prefill_role.py"),
    *("router/requests/dispatch.py", "router/attempts/pair_attempt.py"),
    "engine/frontend/apis/shared/stream.py",
)
RECORDS = ("Struct", "NamedTuple", "TypedDict")  # bases whose subclasses have fields, as dataclasses have


def _by_name(tree: Tree, count: Callable[[Module], Iterator[tuple[str, int]]]) -> dict[str, int]:
    """FILE:NAME -> its count, the largest if definitions share a name."""
    found: dict[str, int] = {}
    for module in tree.of(*AREAS):
        for name, value in count(module):
            key = f"{module.path}:{name}"
            found[key] = max(value, found.get(key, 0))
    return found


def _num_parameters(node: Function) -> int:
    args = node.args
    return sum(arg.arg not in ("self", "cls") for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs))


def constructor_parameters(tree: Tree) -> Mapping[str, int]:
    return _by_name(tree, lambda m: ((name, _num_parameters(f)) for name, f in m.functions if f.name == "__init__"))


def parameters(tree: Tree) -> Mapping[str, int]:
    return _by_name(tree, lambda m: ((name, _num_parameters(f)) for name, f in m.functions if f.name != "__init__"))


def function_lines(tree: Tree) -> Mapping[str, int]:
    return _by_name(tree, lambda m: ((name, length(f)) for name, f in m.functions))


def length(node: Function | ast.ClassDef) -> int:
    """Lines, without decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def fields(tree: Tree) -> Mapping[str, int]:
    return _by_name(tree, lambda m: ((name, _num_fields(node)) for name, node in m.classes if _is_record(node)))


def _is_record(node: ast.ClassDef) -> bool:
    decorators = {last_name(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}
    return "dataclass" in decorators or any(last_name(base) in RECORDS for base in node.bases)


def last_name(node: ast.expr) -> str:
    """`Struct` of `msgspec.Struct`, `Protocol` of `Protocol[T]`; "" for other expressions."""
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _num_fields(node: ast.ClassDef) -> int:
    return sum(isinstance(n, ast.AnnAssign) and last_name(n.annotation) != "ClassVar" for n in node.body)


def imports(tree: Tree) -> Mapping[str, int]:
    """Different modules that a module imports, anywhere in it."""
    return {module.path: len(imported(module)) for module in tree.of(*AREAS)}


def imported(module: Module) -> set[str]:
    """The modules of import statements, as written."""
    names = {node.module or "." for node in module.nodes(ast.ImportFrom)}
    return names | {alias.name for node in module.nodes(ast.Import) for alias in node.names}


def perhaps_imported(module: Module) -> set[str]:
    """Absolute imports, and the names behind `from ... import`, which may be modules, too."""
    absolute = [node for node in module.nodes(ast.ImportFrom) if not node.level]
    behind = {f"{node.module}.{alias.name}" for node in absolute for alias in node.names}
    return imported(module) - {"."} | behind


def none_branches(tree: Tree) -> Mapping[str, int]:
    """`is None` and `is not None` in each file of BASE_PATH, and in all. A file that is not there is a finding."""
    modules = {module.path: module for module in tree.modules}
    found = {path: num_none(modules[path]) for path in BASE_PATH if path in modules}
    absent = {f"{path}, which BASE_PATH names and the tree lacks": 1000 for path in BASE_PATH if path not in modules}
    return found | absent | {"all base path": sum(found.values())}


def num_none(module: Module) -> int:
    """Comparisons with None by `is` and `is not`."""
    return sum(
        isinstance(op, ast.Is | ast.IsNot) and isinstance(side, ast.Constant) and side.value is None
        for node in module.nodes(ast.Compare)
        for op, side in zip(node.ops, node.comparators, strict=True)
    )
