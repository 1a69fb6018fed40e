"""What is reached: tools and benchmarks from the Makefile, flags from the files that read them."""

import ast
import re
from collections.abc import Iterator, Mapping

from tools.house.seams import last_name, perhaps_imported
from tools.house.tree import Module, Tree, directory_of

_PROGRAM = re.compile(r"(?:-m |run = \")([\w.]+)")
_WORD = re.compile(r"\w+(:\w+)?")
_PREFIX = re.compile(r"(?:tools|benchmarks)\.(?:\w+\.)*")
_DOTTED = re.compile(r"(?:tools|benchmarks|tests)(?:\.\w+)+")
_CONFIG = re.compile(r"(?:config|flags|^engine|^server|^disagg)$")
TABLES = ("benchmarks/measures.toml", "benchmarks/gpu/parts.toml", "tools/house/rules.toml")
STARTS = ("Makefile", ".ci/run", *TABLES)
SERVE = "deploy/commands/serve.py"  # the command whose flags are a worker's


def unreached(tree: Tree) -> Mapping[str, int]:
    """Tools and benchmarks that no target of the Makefile reaches: by imports, or by a string that is a module's name."""
    modules = {module.dotted: module for module in tree.modules}
    todo = [name for start in STARTS for name in _PROGRAM.findall(tree.text(start))]
    reached: set[str] = set()
    while todo:
        name = todo.pop()
        for known in (name, f"{name}.__main__"):
            if known in modules and known not in reached:
                reached.add(known)
                todo += _named(modules[known])
    mine = (m for m in tree.of("tools", "benchmarks") if not m.path.endswith("/__init__.py"))
    return {module.path: 1 for module in mine if module.dotted not in reached}


def _named(module: Module) -> Iterator[str]:
    """Modules that a module imports or starts, and names that may be modules: strings, and words behind `f"benchmarks.{name}"`."""
    yield from perhaps_imported(module)
    prose = {id(node.value) for node in module.nodes(ast.Expr)}
    texts = [c.value for c in module.nodes(ast.Constant) if isinstance(c.value, str) and id(c) not in prose]
    words = [text.partition(":")[0] for text in texts if _WORD.fullmatch(text)]
    for text in texts:
        yield from _DOTTED.findall(text)
        if _PREFIX.fullmatch(text):
            yield from (text + word for word in words)


def worker_flags(tree: Tree) -> Mapping[str, int]:
    flags = _flags(tree)
    return {"all worker": len(flags)} if flags else {f"{SERVE}, which gives add_flags no dataclass,": 1000}


def _flags(tree: Tree) -> Mapping[str, str]:
    """Field that is a flag -> its file, of the dataclasses that SERVE gives to `add_flags`, and of their bases."""
    classes = {node.name: (node, module.path) for module in tree.of("product") for _, node in module.classes}
    calls = (call for module in tree.modules if module.path == SERVE for call in module.nodes(ast.Call))
    todo = [last_name(call.args[1]) for call in calls if last_name(call.func) == "add_flags"]
    found: dict[str, str] = {}
    while todo:
        node, path = classes.get(todo.pop(), (None, ""))
        if node is not None:
            todo += [last_name(base) for base in node.bases]
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign) and _is_flag(field.value)]
            found |= {last_name(field.target): path for field in fields}
    return found


def _is_flag(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and last_name(value.func) == "flag"


def flag_readers(tree: Tree) -> Mapping[str, int]:
    """Flag of a worker, as FILE:FIELD -> directories that read it, beside its own and deploy/, which passes it on.

    What reads it names a config in front of it: `config.x`, `self._config.x`, `engine.x`, not `pool.x`.
    """
    flags = _flags(tree)
    readers: dict[str, set[str]] = {field: set() for field in flags}
    for module in tree.of("product"):
        for node in module.nodes(ast.Attribute):
            if node.attr in flags and _CONFIG.search(last_name(node.value)) and not module.path.startswith("deploy/"):
                readers[node.attr].add(module.directory)
    return {f"{path}:{field}": len(readers[field] - {directory_of(path)}) for field, path in flags.items()}
