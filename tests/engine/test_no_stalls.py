"""What runs between steps never copies from pageable memory to the device: such a copy waits for the whole stream."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("engine/executor", "engine/kv", "engine/lora")
AT_START = ("__init__",)


def pageable_copies(source: str) -> Iterator[int]:
    """Lines of torch.tensor(..., device=...) outside of constructors."""
    tree = ast.parse(source)
    at_start = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name in AT_START
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in at_start or ast.unparse(node.func) != "torch.tensor":
            continue
        if any(keyword.arg == "device" for keyword in node.keywords):
            yield node.lineno


def test_no_step_copies_from_pageable_memory() -> None:
    files = sorted(file for folder in FOLDERS for file in (ROOT / folder).glob("*.py"))
    assert len(files) > 20
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in pageable_copies(file.read_text())]
    assert found == [], "use engine/kv/upload.py"


def test_such_a_copy_is_found() -> None:
    source = "class A:\n def __init__(self):\n  torch.tensor([1], device=d)\n def run(self):\n  torch.tensor(\n   [1], device=d)\n  torch.tensor([1])\n"
    assert list(pageable_copies(source)) == [5]
