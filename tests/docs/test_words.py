"""The glossary holds: one class a name, and no class name or page uses a word of its last section."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, prose
from tests.packages import PACKAGES, ROOT
from tools.house import Source, read_source

GLOSSARY = ROOT / "docs" / "glossary.md"
EVERYWHERE, CLASSES = "In pages and class names:", "As class names:"


def test_a_public_class_name_belongs_to_one_class() -> None:
    twice = {name for name, homes in _product().homes.items() if len(set(homes)) > 1}
    assert sorted(twice) == []


def test_no_class_name_uses_a_banned_word() -> None:
    names = {where.partition(":")[2].lstrip("_") for _, _, where in _product().classes}
    banned = {word.lower() for word in _words(EVERYWHERE)}
    found = {name for name in names if banned & {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}}
    found |= names & set(_words(CLASSES))
    assert sorted(found) == []


@pytest.mark.parametrize("page", [p for p in PAGES if p != GLOSSARY], ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_uses_a_banned_word(page: Path) -> None:
    used = set(_words(EVERYWHERE)) & set(re.findall(r"[a-z]+", prose(page.read_text()).lower()))
    assert sorted(used) == []


@cache
def _product() -> Source:
    return read_source(PACKAGES)


def _words(heading: str) -> list[str]:
    """The words in the first column of the glossary's table under `heading`."""
    table = GLOSSARY.read_text().partition(heading)[2].strip().split("\n\n")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    words = [word for row in rows for word in row.split(", ")]
    assert words and all(re.fullmatch(r"\w+", word) for word in words)
    return words
