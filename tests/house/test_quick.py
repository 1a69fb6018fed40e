"""`make quick` finds the tests that a change touches by the imports between them, and takes the nearest that fit."""

import subprocess
from pathlib import Path

import pytest

from tools.quick import Choice, changed_files, choose, touched

TREE = {
    "core/__init__.py": "",
    "core/pages.py": "",
    "core/memory.py": "from core import pages",
    "core/kernel.c": '#include "step.h"',
    "core/step.h": "",
    "core/native.py": 'SOURCE = "kernel.c"',
    "core/gelu.c": "",
    "core/gelu.py": 'SOURCE = Path(__file__).with_suffix(".c")',
    "core/columns.py": "import core.kernel.columns",
    "loop.py": "def run():\n    from core.memory import Memory",
    "tests/conftest.py": "import loop",
    "tests/core/conftest.py": "import core.native",
    "tests/core/test_pages.py": "import core.pages",
    "tests/core/test_memory.py": "import core.memory",
    "tests/test_loop.py": "import loop",
    "tests/test_other.py": "",
    "tests/test_gelu.py": "import core.gelu",
    "tests/test_columns.py": "import core.columns",
    "tests/e2e/ranks/leaders.py": "",
    "tests/e2e/test_pair.py": "import core.pages, tests.e2e.ranks.leaders",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path, text in TREE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path)
    return tmp_path


def git(tree: Path, *args: str) -> None:
    names = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", str(tree), *names, *args], check=True, capture_output=True)


def commit(tree: Path) -> None:
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "a commit")


def steps_of_tests(tree: Path, *changed: str) -> dict[str, int]:
    steps, _, tests = touched(tree, set(changed))
    return {path: steps[path] for path in tests if path in steps}


def test_a_test_file_is_as_far_from_a_change_as_imports_lie_between(tree: Path) -> None:
    near = {"tests/core/test_pages.py": 1, "tests/e2e/test_pair.py": 1}
    assert steps_of_tests(tree, "core/pages.py") == near | {"tests/core/test_memory.py": 2, "tests/test_loop.py": 3}
    assert steps_of_tests(tree, "tests/test_other.py") == {"tests/test_other.py": 0}
    assert steps_of_tests(tree, "tests/conftest.py") == {}


def test_tests_stand_on_the_conftest_of_their_directory_and_on_the_packages_around_an_import(tree: Path) -> None:
    own = {"tests/core/test_memory.py", "tests/core/test_pages.py"}
    assert steps_of_tests(tree, "tests/core/conftest.py").keys() == own
    assert steps_of_tests(tree, "core/native.py").keys() == own
    assert steps_of_tests(tree, "core/__init__.py").keys() == own | {
        *("tests/test_loop.py", "tests/e2e/test_pair.py", "tests/test_gelu.py", "tests/test_columns.py"),
    }


@pytest.mark.parametrize("file", ["core/kernel.c", "core/step.h"])
def test_a_file_that_is_not_python_touches_what_names_it(tree: Path, file: str) -> None:
    assert steps_of_tests(tree, file).keys() == {"tests/core/test_memory.py", "tests/core/test_pages.py"}


def test_a_change_is_what_differs_from_the_merge_base_committed_or_not(tree: Path) -> None:
    git(tree, "checkout", "-q", "-b", "branch")
    (tree / "loop.py").write_text("committed = 1")
    commit(tree)
    (tree / "core/pages.py").write_text("changed = 1")
    (tree / "core/memory.py").unlink()
    (tree / "core/new.py").write_text("")
    git(tree, "branch", "-f", "base", "main")
    assert changed_files(tree, "base") == {"loop.py", "core/pages.py", "core/memory.py", "core/new.py"}
    with pytest.raises(SystemExit, match="git merge-base"):
        changed_files(tree, "no-such-branch")


def test_the_nearest_run_while_they_fit_and_what_starts_processes_only_if_it_changed() -> None:
    steps = {
        "tests/test_near.py": 1,
        "tests/test_far.py": 3,
        "tests/test_long.py": 2,
        "tests/test_up.py": 1,
        "core/a.py": 0,
    }
    needed_s = {
        "tests/test_near.py": 4.0,
        "tests/test_far.py": 5.0,
        "tests/test_long.py": 50.0,
        "tests/test_up.py": 1.0,
    }
    up = {"tests/test_up.py", "tests/test_changed_up.py"}
    assert choose(steps, up, needed_s, 10.0) == Choice(
        ["tests/test_near.py", "tests/test_far.py"], ["tests/test_long.py"], ["tests/test_up.py"]
    )
    changed = {"tests/test_changed_up.py": 0}
    assert choose(changed, up, {"tests/test_changed_up.py": 1.0}, 10.0).run == list(changed)
