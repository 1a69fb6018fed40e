"""Budgets of directories: lines, files and public names; directories of few or many files, and small files."""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping

from tools.house.tree import AREAS, Definition, Module, Tree, area_of, directory_of

CRUMB = 40  # lines
THIN = 3  # files of a directory


def _by_directory(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sums of the files of each directory, not of those below it, and of each area."""
    sums: Counter[str] = Counter()
    for path, size in sizes.items():
        sums[directory_of(path)] += size
        sums[f"all {area_of(path)}"] += size
    return dict(sums)


def _lines_by_file(tree: Tree) -> dict[str, int]:
    native = {path: num_lines for path, num_lines in tree.native.items() if area_of(path) in AREAS}
    return {module.path: module.num_lines for module in tree.of(*AREAS)} | native


def lines(tree: Tree) -> Mapping[str, int]:
    return _by_directory(_lines_by_file(tree))


def files(tree: Tree) -> Mapping[str, int]:
    return _by_directory(dict.fromkeys(_lines_by_file(tree), 1))


def public_names(tree: Tree) -> Mapping[str, int]:
    return _by_directory({module.path: len(set(_public(module))) for module in tree.of(*AREAS)})


def _public(module: Module) -> Iterator[str]:
    """Functions, classes and variables of a module whose names have no underscore in front."""
    for node in module.tree.body:
        if isinstance(node, Definition):
            names = [node.name]
        else:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        yield from (name for name in names if not name.startswith("_"))


def own_files(tree: Tree) -> Mapping[str, int]:
    """Files of each directory that has some, without `__init__.py`."""
    paths = (path for path in _lines_by_file(tree) if not path.endswith("/__init__.py"))
    return Counter(directory_of(path) for path in paths)


def thin_directories(tree: Tree) -> Mapping[str, int]:
    return {directory: THIN - count for directory, count in own_files(tree).items() if count < THIN}


def crumbs(tree: Tree) -> Mapping[str, int]:
    small = (m.path for m in tree.of("product") if m.num_lines < CRUMB and not m.path.endswith("/__init__.py"))
    return dict.fromkeys(small, 1)
