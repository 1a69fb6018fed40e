"""Doubles: a Protocol of the product may have one in tests, tools and benchmarks together.

A double is a class there that inherits from the Protocol, or has all of its members: methods, annotated names, and attributes that
its methods set, also those of bases found by name. Only Protocols with two members or more are compared by members. Not found:
mocks, functions and modules that stand in, classes that answer by `__getattr__`, doubles of classes that are no Protocols.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

from tools.house.seams import last_name
from tools.house.tree import Rule, Tree

FEW = 2  # members


def doubles(tree: Tree) -> Mapping[str, int]:
    """ "FILE:PROTOCOL" -> classes outside the product that stand in for it."""
    classes: defaultdict[str, list[ast.ClassDef]] = defaultdict(list)
    for module in tree.modules:
        for _, node in module.classes:
            classes[node.name].append(node)
    standing_in = [
        (_members(node, classes), set(_bases(node, classes)))
        for module in tree.of("tests", "tools", "benchmarks")
        for _, node in module.classes
        if not _is_protocol(node)
    ]
    found: dict[str, int] = {}
    for module in tree.of("product"):
        for name, node in module.classes:
            if not _is_protocol(node):
                continue
            members = _members(node, classes)
            found[f"{module.path}:{name}"] = sum(
                node.name in bases or (len(members) >= FEW and members <= own) for own, bases in standing_in
            )
    return found


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(last_name(base) == "Protocol" for base in node.bases)


def _bases(node: ast.ClassDef, classes: Mapping[str, list[ast.ClassDef]]) -> Iterator[str]:
    """Names of all bases, and of theirs. A name that several classes bear is followed no further."""
    todo, seen = [node], {node.name}
    while todo:
        for name in {last_name(base) for base in todo.pop().bases} - seen:
            seen.add(name)
            yield name
            todo += classes[name] if len(classes.get(name, ())) == 1 else []


def _members(node: ast.ClassDef, classes: Mapping[str, list[ast.ClassDef]]) -> set[str]:
    """Public names of a class and its bases."""
    nodes = [node] + [classes[base][0] for base in _bases(node, classes) if len(classes.get(base, ())) == 1]
    return {name for each in nodes for name in _own_members(each) if not name.startswith("_")}


def _own_members(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield part.name
            yield from (n.attr for n in ast.walk(part) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
        elif isinstance(part, ast.AnnAssign):
            yield last_name(part.target)
        elif isinstance(part, ast.Assign):
            yield from (last_name(target) for target in part.targets)


RULES = (Rule("doubles", "doubles of a Protocol outside the product", "use the one that is there", doubles, most=1),)
