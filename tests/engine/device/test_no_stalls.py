"""What runs between steps never waits for the device: by a copy from pageable memory, or by a value that the host asks for."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("engine/executor", "engine/kv", "engine/lora")
AT_START = ("__init__",)


def waits(source: str) -> Iterator[int]:
    """Lines of torch.tensor(..., device=...), x.item() and x.cpu() outside of constructors."""
    tree = ast.parse(source)
    at_start = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name in AT_START
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in at_start:
            continue
        pageable = ast.unparse(node.func) == "torch.tensor" and any(k.arg == "device" for k in node.keywords)
        if pageable or (isinstance(node.func, ast.Attribute) and node.func.attr in ("item", "cpu")):
            yield node.lineno


def test_no_step_waits() -> None:
    files = sorted(file for folder in FOLDERS for file in (ROOT / folder).glob("*.py"))
    assert len(files) > 20
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in waits(file.read_text())]
    assert found == [], "use engine/kv/step_batch.py"


def test_such_waits_are_found() -> None:
    source = "class A:\n def __init__(self):\n  torch.tensor([1], device=d)\n def run(self):\n  torch.tensor(\n   [1], device=d)\n  torch.tensor([1])\n  x.item()\n  x.cpu()\n"
    assert list(waits(source)) == [5, 8, 9]
