"""One class a name, and the field's words: pages and class names use no word of tools/house/words.toml."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, prose
from tests.packages import PACKAGES, ROOT
from tools.house.words import CLASSES, EVERYWHERE


def test_a_public_class_name_belongs_to_one_class() -> None:
    twice = [name for name, files in _product_classes().items() if files > 1 and not name.startswith("_")]
    assert sorted(twice) == []


def test_no_class_name_uses_a_banned_word() -> None:
    names = {name.lstrip("_") for name in _product_classes()}
    found = {
        name for name in names if set(EVERYWHERE) & {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
    }
    found |= names & set(CLASSES)
    assert sorted(found) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_uses_a_banned_word(page: Path) -> None:
    used = set(EVERYWHERE) & set(re.findall(r"[a-z]+", prose(page.read_text()).lower()))
    assert sorted(used) == []


@cache
def _product_classes() -> Counter[str]:
    """Class names, each once for every file that defines it."""
    texts = (file.read_text() for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return Counter(name for text in texts for name in set(re.findall(r"^ *class (\w+)[(:]", text, re.MULTILINE)))
