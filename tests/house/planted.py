"""A small repository on disk."""

from collections.abc import Mapping
from pathlib import Path

from tools.house.tree import Tree


def plant(root: Path, files: Mapping[str, str]) -> Tree:
    """Write the files and read the tree."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return Tree.read(root)


def function(name: str, num_parameters: int = 0, num_lines: int = 2) -> str:
    parameters = ", ".join(f"p{i}" for i in range(num_parameters))
    return f"def {name}({parameters}):\n" + "    pass\n" * (num_lines - 1)
