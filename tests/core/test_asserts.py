"""An assert changes nothing: `python -O` drops it, with all that it calls.

Read from the syntax tree. What an assert may call is listed: questions, whose answer is all that they give.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.packages import PACKAGES, ROOT

_BUILTINS = "all any int isinstance len list max min range set sorted sum zip"
_QUESTIONS = (
    "_evictable_leaf all count counts find has has_place is_contiguous is_pinned is_set items key_of keys state_of"
)
BUILTINS = frozenset(_BUILTINS.split())
QUESTIONS = frozenset([*_QUESTIONS.split(), "may_become", "stride", "total", "values"])


def changes(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) for each part of an assert that may change something."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            for part in ast.walk(node.test):
                if isinstance(part, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
                    yield node.lineno, type(part).__name__
                elif isinstance(part, ast.Call) and not _only_asks(part.func):
                    yield node.lineno, ast.unparse(part.func)


def _only_asks(called: ast.expr) -> bool:
    if isinstance(called, ast.Attribute):
        return called.attr in QUESTIONS
    return isinstance(called, ast.Name) and called.id in BUILTINS | QUESTIONS


@pytest.mark.parametrize("package", PACKAGES)
def test_no_assert_changes_anything(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = [f"{file.relative_to(ROOT)}:{line}: {what}" for file in files for line, what in changes(file.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source", ["assert scheduler.held.adopt(r) is None", "assert (n := f.read())", "assert queue.pop() == 1, queue"]
)
def test_what_changes_something_is_found(source: str) -> None:
    assert list(changes(source))
