"""Words and bytes of what is written for people: docstrings, pages, subjects of commits."""

import subprocess
from collections.abc import Mapping

from tools.house.tree import Tree

BASE = "8daf0ecf"  # subjects of later commits are checked


def docstring_words(tree: Tree) -> Mapping[str, int]:
    said = (text for module in tree.of("product") for _, text in module.docstrings)
    return {"all product": sum(len(text.split()) for text in said)}


WRITTEN = ("docs/api.md", "docs/flags.md")  # by tools


def docs_words(tree: Tree) -> Mapping[str, int]:
    """Of the hand-written pages: README.md and docs/ without reports and what tools write."""
    pages = [p for p in tree.files if p == "README.md" or (p.startswith("docs/") and p.endswith(".md"))]
    hand_written = [p for p in pages if p not in WRITTEN and not p.startswith("docs/reports/")]
    return {"all docs": sum(len(tree.text(page).split()) for page in hand_written)}


def page_bytes(tree: Tree) -> Mapping[str, int]:
    page = "docs/architecture.md"
    return {page: len(tree.text(page).encode())}


def subjects(tree: Tree) -> Mapping[str, int]:
    """Lengths of the subjects of commits after BASE; none where git has no such history."""
    command = ["git", "-C", str(tree.root), "log", "--no-merges", "--format=%h %s", f"{BASE}..HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return {line: len(line.partition(" ")[2]) for line in done.stdout.splitlines()}
