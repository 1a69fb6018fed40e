"""What is reached: tools and benchmarks from the Makefile, flags from the files that read them."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from tools.house.seams import imported, last_name
from tools.house.tree import Module, Rule, Tree

_PROGRAM = re.compile(r"-m ([\w.]+)")
_WORD = re.compile(r"\w+(:\w+)?")
_PREFIX = re.compile(r"(?:tools|benchmarks)\.(?:\w+\.)*")
_DOTTED = re.compile(r"(?:tools|benchmarks|tests)(?:\.\w+)+")
_CONFIG = re.compile(r"(?:config|flags|^engine|^server|^disagg)$")
STARTS = ("Makefile", ".ci/run")
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
    yield from imported(module)
    for node in module.nodes(ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    prose = {id(node.value) for node in module.nodes(ast.Expr)}
    texts = [c.value for c in module.nodes(ast.Constant) if isinstance(c.value, str) and id(c) not in prose]
    words = [text.partition(":")[0] for text in texts if _WORD.fullmatch(text)]
    for text in texts:
        yield from _DOTTED.findall(text)
        if _PREFIX.fullmatch(text):
            yield from (text + word for word in words)


def worker_flags(tree: Tree) -> Mapping[str, int]:
    return {"all worker": len(_flags(tree))}


def _flags(tree: Tree) -> Mapping[str, str]:
    """Field that is a flag -> its file, of the dataclasses that SERVE gives to `add_flags`, and of their bases."""
    classes = {node.name: (node, module.path) for module in tree.of("product") for _, node in module.classes}
    calls = [
        call
        for m in tree.modules
        if m.path == SERVE
        for call in m.nodes(ast.Call)
        if last_name(call.func) == "add_flags"
    ]
    todo = [last_name(call.args[1]) for call in calls]
    found: dict[str, str] = {}
    while todo:
        node, path = classes.get(todo.pop(), (None, ""))
        if node is not None:
            todo += [last_name(base) for base in node.bases]
            found |= {
                last_name(n.target): path for n in node.body if isinstance(n, ast.AnnAssign) and _is_flag(n.value)
            }
    return found


def _is_flag(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and last_name(value.func) == "flag"


def flag_readers(tree: Tree) -> Mapping[str, int]:
    """Flag of a worker -> the rooms that read it, an attribute of something that is named as a config is; deploy/ passes it on."""
    flags = _flags(tree)
    readers = {field: {str(PurePosixPath(path).parent)} for field, path in flags.items()}
    for module in tree.of("product"):
        for node in module.nodes(ast.Attribute):
            if node.attr in flags and _CONFIG.search(last_name(node.value)) and not module.path.startswith("deploy/"):
                readers[node.attr].add(module.folder)
    return {f"{path}:{field}": len(readers[field] - {str(PurePosixPath(path).parent)}) for field, path in flags.items()}


RULES = (
    Rule("unreached", "program that the Makefile does not reach", "give it a target or delete it", unreached),
    Rule("worker_flags", "flags", "a constant with a unit and a reason", worker_flags, aims={"all worker": 130}),
    Rule("flag_readers", "rooms that read a flag", "its room reads it, others ask the room", flag_readers, most=1),
)
