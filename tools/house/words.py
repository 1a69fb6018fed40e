"""The field's words instead of our own: in names, docstrings and pages; the form of docstrings; how much text there is."""

import ast
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tools.house.tree import Module, Tree


def _table(rows: Mapping[str, str]) -> Mapping[str, str]:
    """Our word -> what to write instead, of the reverse, which is shorter."""
    return {ours: field for field, words in rows.items() for ours in words.split()}


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
EVERYWHERE = _table(_DATA["everywhere"])
OURS = _table(_DATA["names_and_docstrings"])
OURS_IN_NAMES = _table(_DATA["names"])
CLASSES: Mapping[str, str] = _DATA["classes"]
WIDTH = 100  # columns
GLOSSARY = "docs/glossary.md"

NAME = re.compile(r"[A-Za-z_]\w*")
_EDGE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|_+")
_TEXT = re.compile(r'""".*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*', re.S)  # or a comment
_CODE = re.compile(r"`[^`]*`")
_CLAUSE = re.compile(r"(?:[Oo]f|[Aa]s|[Ww]hat|[Ww]hich|[Ww]hether|[Ww]ho(?:se|m)?|that|where)\b")


def spaced(name: str) -> str:
    """The words of a name: "max lora rank" of `max_lora_rank` and of `MaxLoraRank`."""
    return _EDGE.sub(" ", name).lower()


def _any_of(*tables: Mapping[str, str]) -> re.Pattern[str]:
    words = "|".join(word.replace("_", r"\s+") for table in tables for word in table)
    return re.compile(rf"\b(?:{words})\b")


def _count(pattern: re.Pattern[str], texts: Iterable[str], total: str) -> Mapping[str, int]:
    words = Counter("_".join(word.split()) for text in texts for word in pattern.findall(text))
    return {total: words.total(), **words}


def names(tree: Tree) -> Mapping[str, int]:
    """Word -> how many names of the product hold it: a name counts once, wherever and in whatever case it is used."""
    found = {name for module in tree.of("product") for name in NAME.findall(_TEXT.sub(" ", module.text))}
    return _count(_any_of(EVERYWHERE, OURS, OURS_IN_NAMES), {spaced(name).strip() for name in found}, "all names")


def docstrings(tree: Tree) -> Mapping[str, int]:
    """Word -> how often docstrings of the product hold it, apart from code."""
    texts = (_CODE.sub(" ", text).lower() for module in tree.of("product") for _, text in module.docstrings)
    return _count(_any_of(EVERYWHERE, OURS), texts, "all docstrings")


def openings(tree: Tree) -> Mapping[str, int]:
    """Package -> docstrings that begin with a clause instead of a sentence or the name of a thing."""
    return _by_package(tree, lambda module: sum(bool(_CLAUSE.match(text.lstrip())) for _, text in module.docstrings))


def wide_prose(tree: Tree) -> Mapping[str, int]:
    """Package -> lines of docstrings that are too wide for two columns of a diff."""
    return _by_package(tree, lambda module: sum(len(line) > WIDTH for line in _docstring_lines(module)))


def _docstring_lines(module: Module) -> Iterator[str]:
    lines = module.text.split("\n")
    for node in (module.tree, *(node for _, node in module.definitions)):
        match node.body:
            case [ast.Expr(value=ast.Constant(value=str(), lineno=first, end_lineno=last)), *_]:
                yield from lines[first - 1 : last]


def none_lists(tree: Tree) -> Mapping[str, int]:
    """Package -> what docstrings of classes say about None, outside configuration: each is the price of an Optional."""
    return _by_package(tree, _none_lists)


def _none_lists(module: Module) -> int:
    if "config" in module.path or "/flags" in module.path:
        return 0
    said = (ast.get_docstring(node, clean=False) or "" for _, node in module.classes)
    return sum(len(re.findall(r"\bNone:", text)) for text in said)


def _by_package(tree: Tree, count: Callable[[Module], int]) -> Mapping[str, int]:
    found = Counter[str]()
    for module in tree.of("product"):
        found[module.path.partition("/")[0]] += count(module)
    return found


def glossary(tree: Tree) -> Mapping[str, int]:
    """The rows of the glossary's tables."""
    lines = tree.text(GLOSSARY).split("\n")
    rows = sum(line.startswith("|") for line in lines)
    return {GLOSSARY: rows - 2 * sum(line.startswith("|--") for line in lines)}


# ---- amounts of text

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
