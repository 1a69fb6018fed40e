"""Doubles: a Protocol of the product may have one in tests, tools and benchmarks together.

A double is a class there that inherits from the Protocol, or has all of its members (two or more, bases' too): attributes, and
methods with the same names of parameters or with `*args`. Not found: mocks, functions and modules that stand in, classes that answer
by `__getattr__`, doubles of classes that are no Protocols. A class that has the members by chance counts, too; one that inherits
from a double does not.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

from tools.house.seams import last_name
from tools.house.tree import Function, Tree

FEW = 2  # members
_ANY = "*"  # parameters that take everything, and attributes, which may be functions

Classes = Mapping[str, list[ast.ClassDef]]
Members = Mapping[str, tuple[str, ...]]


def doubles(tree: Tree) -> Mapping[str, int]:
    """Protocol, as FILE:NAME -> classes outside the product that stand in for it."""
    classes: defaultdict[str, list[ast.ClassDef]] = defaultdict(list)
    for module in tree.modules:
        for _, node in module.classes:
            classes[node.name].append(node)
    outside = [node for module in tree.of("tests", "tools", "benchmarks") for _, node in module.classes]
    others = [
        (node.name, _members(node, classes), set(_bases(node, classes))) for node in outside if not _is_protocol(node)
    ]
    found: dict[str, int] = {}
    for module in tree.of("product"):
        for name, node in module.classes:
            if _is_protocol(node):
                wanted = _members(node, classes)
                all_of_it = [(n, bases) for n, has, bases in others if node.name in bases or _has_all(has, wanted)]
                names = {n for n, _ in all_of_it}
                found[f"{module.path}:{name}"] = sum(not (bases & names) for _, bases in all_of_it)
    return found


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(last_name(base) == "Protocol" for base in node.bases)


def _has_all(has: Members, wanted: Members) -> bool:
    return len(wanted) >= FEW and all(
        name in has and (parameters == has[name] or _ANY in (*parameters, *has[name]))
        for name, parameters in wanted.items()
    )


def _bases(node: ast.ClassDef, classes: Classes) -> Iterator[str]:
    """Names of all bases, and of theirs. A name that several classes bear is followed no further."""
    todo, seen = [node], {node.name}
    while todo:
        for name in {last_name(base) for base in todo.pop().bases} - seen:
            seen.add(name)
            yield name
            todo += classes[name] if len(classes.get(name, ())) == 1 else []


def _members(node: ast.ClassDef, classes: Classes) -> Members:
    """Public names of a class and its bases, with the parameters of methods."""
    bases = [classes[name][0] for name in _bases(node, classes) if len(classes.get(name, ())) == 1]
    found = {name: parameters for each in (*reversed(bases), node) for name, parameters in _own_members(each)}
    return {name: parameters for name, parameters in found.items() if not name.startswith("_")}


def _own_members(node: ast.ClassDef) -> Iterator[tuple[str, tuple[str, ...]]]:
    for part in node.body:
        if isinstance(part, Function):
            stored = (n for n in ast.walk(part) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
            yield from ((attribute.attr, (_ANY,)) for attribute in stored)
            yield part.name, _parameters(part)
        elif isinstance(part, ast.AnnAssign | ast.Assign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            yield from ((last_name(target), (_ANY,)) for target in targets)


def _parameters(node: Function) -> tuple[str, ...]:
    args = node.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs) if arg.arg != "self"]
    return (_ANY,) if args.vararg or node.decorator_list else tuple(names)
