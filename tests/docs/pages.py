"""The hand-written pages, and their text without code."""

import re
from pathlib import Path

from tests.packages import ROOT

WRITTEN = [ROOT / "docs" / name for name in ("api.md", "flags.md")]  # by tools/api_table.py, tools/flags_table.py
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "reports" not in path.parts and path not in WRITTEN),
]
REPORTS = [*WRITTEN, *sorted((ROOT / "docs" / "reports").glob("*.md"))]

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4,}[^\n]*\n)+")
_SPAN = re.compile(r"`[^`\n]*`")
_LINK_TARGET = re.compile(r"\]\([^)\n]*\)")


def prose(text: str) -> str:
    """Remove code blocks, code spans and the targets of links."""
    for pattern in (_FENCED, _INDENTED, _SPAN, _LINK_TARGET):
        text = pattern.sub(" ", text)
    return text


def without_blocks(text: str) -> str:
    """Remove fenced blocks alone."""
    return _FENCED.sub("", text)


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
