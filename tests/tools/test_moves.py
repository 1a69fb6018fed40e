"""Moves by a table: a small tree, rewritten, whose programs still run."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.moves.__main__ import apply
from tools.moves.table import Table

TREE = {
    "engine/__init__.py": "",
    "engine/core/__init__.py": '"""The core."""\n',
    "engine/core/pages.py": '''"""Pages of `MOST_PAGES` (engine/core/names.py)."""

from engine.core import names
from engine.core.names import MOST_PAGES, label as label_of


class Pages(names.Named):
    """Some pages."""

    def show(self) -> str:
        from engine.core.names import FIRST

        return f"{label_of(self)} {MOST_PAGES} {FIRST}"
''',
    "engine/core/names.py": '''"""Names \\\\- of things."""

# What a name begins with.
FIRST = "a"
MOST_PAGES = 3


class Named:
    """Has a label."""


def label(thing: Named) -> str:
    return FIRST + type(thing).__name__
''',
    "engine/core/old/__init__.py": "",
    "engine/core/old/part.py": 'from pathlib import Path\n\nROOT = Path(__file__).parents[3]\nFIRST = "b"\n',
    "engine/core_parts.py": """from engine.core import names, pages
from engine.core.old import part

FIRST = names.FIRST

if __name__ == "__main__":
    print(pages.Pages().show(), FIRST, part.FIRST, part.ROOT.name, "engine.core.names", "names.py")
""",
    "features.toml": 'base = ["engine/*.py", "engine/core/"]\n\n[feature.old]\nrooms = ["engine/core/old/p*.py"]\ntests = []\n',
    "house.toml": '[imports]\n"engine/core/names.py" = 2\n"engine/core/pages.py" = { limit = 3, because = "x", issue = 1 }\n',
    "pyproject.toml": 'containers = ["engine.core"]\nexhaustive = true\nlayers = ["old", "pages", "names"]\n',
}
TABLE = """
[merge]
"engine/core/pages.py" = ["pages", "names"]
[into]
"engine/core" = ["engine/core/old/part.py"]
[name]
MOST_PAGES = "MAX_PAGES"
"""


def moved(root: Path, table: str = TABLE, **files: str) -> Path:
    for path, text in (TREE | files).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return again(root, table)


def again(root: Path, table: str = TABLE) -> Path:
    (root.parent / "table.toml").write_text(table)
    apply(Table.read(root.parent / "table.toml", texts(root)), root)
    return root


def texts(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for path in root.rglob("*.*")
        if path.suffix in (".py", ".toml")
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "tree"


def test_the_programs_do_what_they_did(root: Path) -> None:
    moved(root)
    done = subprocess.run(
        [sys.executable, "-m", "engine.core_parts"], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "aPages 3 a a b tree engine.core.pages pages.py\n"
    assert not (root / "engine/core/names.py").exists() and not (root / "engine/core/old/__init__.py").exists()


def test_one_module_of_two_has_each_name_before_it_is_read(root: Path) -> None:
    text = (moved(root) / "engine/core/pages.py").read_text()
    assert text.startswith('"""Pages of `MAX_PAGES` (engine/core/pages.py)."""\n')
    assert (
        text.index("# What a name begins with.\nFIRST") < text.index("class Named") < text.index("class Pages(Named)")
    )
    assert "import" not in text and "label(self)" in text


def test_a_second_run_changes_nothing(root: Path) -> None:
    first = texts(moved(root))
    assert texts(again(root)) == first


def test_lists_of_files_follow(root: Path) -> None:
    moved(root)
    features = tomllib.loads((root / "features.toml").read_text())
    assert features["base"] == ["engine/*.py", "engine/core/"]
    assert features["feature"]["old"]["rooms"] == ["engine/core/part.py"]
    assert tomllib.loads((root / "house.toml").read_text())["imports"]["engine/core/pages.py"]["limit"] == 5
    assert tomllib.loads((root / "pyproject.toml").read_text())["layers"] == ["pages"]


@pytest.mark.parametrize(
    ("table", "other", "problem"),
    [
        (TABLE, "def label() -> None: ...\n", "label: in engine/core/pages.py and in engine/core/names.py"),
        ('[name]\nMOST_PAGES = "FIRST"\n', "", "FIRST, for MOST_PAGES: there already"),
        (
            '[edit]\nrows = [["engine/core_parts.py", "no such text", "x"]]\n',
            "",
            "engine/core_parts.py: 0 times there: no such text",
        ),
    ],
)
def test_a_row_that_does_not_fit_changes_nothing(root: Path, table: str, other: str, problem: str) -> None:
    pages = TREE["engine/core/pages.py"].replace(", label as label_of", "").replace("label_of", "label") + other
    with pytest.raises(SystemExit, match=problem):
        moved(root, table, **({"engine/core/pages.py": pages} if other else {}))
    assert (root / "engine/core/names.py").exists()


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ('[move]\n"engine/core_parts.py" = "engine/core/pages.py"\n', "there is such a file"),
        ('[merge]\n"engine/core/pages.py" = ["names", "engine/core_parts.py"]\n', "there already, and not of its row"),
        (
            '[move]\n"engine/core_parts.py" = "engine/a.py"\n[into]\n"engine/core" = ["engine/core_parts.py"]\n',
            "two rows",
        ),
        ('[name]\nnames = "titles"\n', "a word of English, or a module's name"),
    ],
)
def test_rows_that_contradict_each_other_are_refused(root: Path, table: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        moved(root, table)
