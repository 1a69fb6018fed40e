"""Rows of tools/mutants: each still fits the product, and one that does not is never taken for one that was found."""

from types import SimpleNamespace
from typing import Any

import pytest

from tools.mutants.planting import TABLES, Bug, OutOfDate, bugs_of


def test_every_planted_bug_fits() -> None:
    misfits = []
    for bug in (bug for table in TABLES for bug in bugs_of(table).values()):
        try:
            bug.code()
        except OutOfDate as error:
            misfits.append(str(error))
    assert not misfits, "\n".join(misfits)


def planted(**change: object) -> Bug:
    return Bug("a bug", "", {"at": "engine/core/mem_cache/page_allocator.py PageAllocator.evict", **change})


def test_a_bug_that_does_not_fit_is_out_of_date() -> None:
    for change in (
        {"at": "engine/core/mem_cache/page_allocator.py PageAllocator.no_such"},
        {"at": "engine/no_such_file.py PageAllocator.evict"},
        {"old": "no such text", "new": ""},
        {"old": "self", "new": "self"},  # more than once
        {"last": "no_such_function(pages)"},
        {"last": "self._no_such.clear()"},
    ):
        with pytest.raises(OutOfDate):
            planted(**change).code()


def test_an_error_of_the_bugs_own_lines_is_told_from_what_it_does() -> None:
    bug = planted(last="self._no_such.clear()")
    assert bug.explains("AttributeError: 'PageAllocator' object has no attribute '_no_such'")
    assert bug.explains("TypeError: Pages._no_such() takes 1 positional argument but 2 were given")
    assert not bug.explains("AttributeError: 'NoneType' object has no attribute '_no_such'")
    assert not bug.explains("AttributeError: 'PageAllocator' object has no attribute 'other'")


def test_a_change_is_made_around_the_function_and_in_it() -> None:
    change = {
        "first": "num_tokens = 8",
        "old": "known + num_tokens",
        "new": "known + 2 * num_tokens",
        "result": "-result",
    }
    bug = Bug("", "", {"at": "engine/core/memory.py growth_pages", **change})
    names: dict[str, Any] = {"__name__": "planted"}
    exec(bug.code(), names)
    allocator, request = SimpleNamespace(pages_for=lambda tokens: -(-tokens // 4)), SimpleNamespace(num_tokens=4)
    assert names["growth_pages"](allocator, request, 1) == -4
