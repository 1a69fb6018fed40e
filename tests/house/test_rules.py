"""Each rule measures what it names in a small tree."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.house.planted import function, plant
from tools.house import seams, words
from tools.house.__main__ import RULES
from tools.house.ratchet import above
from tools.house.tree import Tree

BY_NAME = {rule.name: rule for rule in RULES}

PROTOCOLS = """
class Kept(Protocol):
    def get(self, key): ...
    def put(self, key, value): ...
class Small(Protocol):
    def get(self, key): ...
"""
FAKES = """
class Fake:
    def __init__(self):
        self.get = None
    def put(self, *args): ...
class LateFake(Fake): ...
class ByChance:
    def get(self, name): ...
    put = None
"""
MORE_FAKES = """
class Mine(Kept): ...
class Other:
    def get(self, key): ...
    def put(self, key, value): ...
class A(Small): ...
class B(Small): ...
"""
SERVE = "add_flags(parser, Config, title='x')\n"
CONFIG = """
class Base(FlagSet):
    host: str = flag('')
class Config(Base):
    size: int = flag(1)
    other: int = 2
"""

CASES: dict[str, tuple[Mapping[str, str], Mapping[str, int]]] = {
    "lines": (
        {"engine/core/a.py": "x\n" * 90_000, "engine/a.c": "\n" * 7, "docs/conf.py": "x\n"},
        {"engine/core": 90_000, "engine": 7, "all product": 90_007},
    ),
    "files": ({"tests/a.py": "", "tests/b.h": "", "tests/c.md": ""}, {"tests": 2, "all tests": 2}),
    "public_names": (
        {"tools/a.py": "A = _b = 1\nC: int = 2\ndef d(): ...\nclass _E: ...\nclass F:\n    g = 1\n"},
        {"tools": 4, "all tools": 4},
    ),
    "crowded_directories": ({f"router/a{i}.py": "" for i in range(26)}, {"router": 26}),
    "thin_directories": (
        {"router/__init__.py": "", "engine/a.py": "", "engine/b.py": "", "engine/x/__init__.py": ""},
        {"engine": 1},
    ),
    "crumbs": ({"engine/a.py": "x\n" * 39, "engine/b.py": "x\n" * 40, "tests/a.py": "", "engine/__init__.py": ""}, {"engine/a.py": 1}),
    "constructor_parameters": (
        {"engine/a.py": "class A:\n    def __init__(self, a, b, c, d, e, f, *, g, h, i=0): ...\n" + function("f", 9)},
        {"engine/a.py:A.__init__": 9},
    ),
    "parameters": (
        {"engine/a.py": function("f", 8) + function("g", 7)},
        {"engine/a.py:f": 8},
    ),
    "imports": (
        {"engine/a.py": "".join(f"from b import m{i}\nimport m{i}\n" for i in range(25)), "engine/b.py": "import os, sys\n"},
        {"engine/a.py": 26},
    ),
    "fields": (
        {"engine/a.py": "@dataclass(frozen=True)\nclass A:\n    k: ClassVar[int] = 1\n" + "".join(f"    f{i}: int\n" for i in range(26))},
        {"engine/a.py:A": 26},
    ),
    "function_lines": (
        {"engine/a.py": function("long", num_lines=61) + function("short", num_lines=60)},
        {"engine/a.py:long": 61},
    ),
    "doubles": (
        {"engine/a.py": PROTOCOLS, "tests/a.py": FAKES, "tools/a.py": MORE_FAKES},
        {"engine/a.py:Kept": 3, "engine/a.py:Small": 2},
    ),
    "unreached": (
        {
            "Makefile": "x:\n\tpython -m tools.run\n",
            "tools/run/__main__.py": "import tools.lib\nargv = ['-m', 'tools.child']\nkinds = ['one:go']\nload(f'benchmarks.kinds.{kind}')\n",
            "tools/lib.py": '"""Not benchmarks.left."""\n',
            "tools/child.py": "",
            "benchmarks/kinds/one.py": "",
            "benchmarks/left.py": "",
            "tests/a.py": "import benchmarks.left",
            "benchmarks/measures.toml": '[a]\nrun = "benchmarks.listed:measure"\n',
            "benchmarks/listed.py": "",
        },
        {"benchmarks/left.py": 1},
    ),
    "worker_flags": (
        {"deploy/commands/serve.py": SERVE, "engine/config.py": "class Config:\n" + "".join(f"    f{i}: int = flag(1)\n" for i in range(131))},
        {"all worker": 131},
    ),
    "flag_readers": (
        {
            "deploy/commands/serve.py": SERVE + "config.size\n",
            "engine/config.py": CONFIG,
            "engine/core/a.py": "config.size\nself._config.host\nconfig.other\n",
            "router/a.py": "engine.size\nengine.host\nconfig.other\n",
            "disagg/a.py": "pool.size\n",
            "engine/a.py": "config.size\n",
        },
        {"engine/config.py:size": 2, "engine/config.py:host": 2},
    ),
    "docstring_words": ({"engine/a.py": f'"""{"a " * 69_999}"""\ndef f():\n    "b c"\n', "tests/a.py": '"""d"""'}, {"all product": 70_001}),
    "docs_words": ({"README.md": "a " * 26_000, "docs/a.md": "b", "docs/api.md": "c", "docs/flags.md": "e", "docs/reports/r.md": "d"}, {"all docs": 26_001}),
    "page_bytes": ({"docs/architecture.md": "é" * 6_001}, {"docs/architecture.md": 12_002}),
    "plain_chat": ({"house.toml": '[plain_chat]\n"files" = 120\n'}, {"files": 120}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_rule_finds_what_is_planted_and_nothing_else(name: str, tmp_path: Path) -> None:
    files, expected = CASES[name]
    assert above(BY_NAME[name], BY_NAME[name].measure(plant(tmp_path, files))) == expected


def test_every_rule_is_seen_here() -> None:
    tested_alone = ("tools.house.register", "tools.house.words")  # by files of their own
    elsewhere = {rule.name for rule in RULES if rule.measure.__module__ in tested_alone}
    assert {rule.name for rule in RULES} == {*CASES, "none_branches", "subjects", *elsewhere}


def test_branches_on_none_are_counted_in_the_base_path(tmp_path: Path) -> None:
    branches = "x is None\ny is not None\nz == None\na is b\na is True\n"
    tree = plant(tmp_path, dict.fromkeys((*seams.BASE_PATH[1:], "engine/other.py"), branches))
    found = seams.none_branches(tree)
    assert (
        found[seams.BASE_PATH[1]] == 2
        and found["all base path"] == 2 * len(seams.BASE_PATH[1:])
        and "engine/other.py" not in found
    )
    (absent,) = above(BY_NAME["none_branches"], found)
    assert absent.startswith(seams.BASE_PATH[0])


def test_a_command_without_flags_is_a_finding(tmp_path: Path) -> None:
    tree = plant(tmp_path, {"deploy/commands/serve.py": "", "engine/config.py": CONFIG})
    assert list(above(BY_NAME["worker_flags"], BY_NAME["worker_flags"].measure(tree))) != []


def test_a_subject_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*args: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@t")
        return subprocess.run(["git", "-C", tmp_path, *who, *args], check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    for subject in ("b" * 90, "s: " + "a" * 69, "s: " + "a" * 70):
        git("commit", "-qm", subject, "--allow-empty")
    monkeypatch.setattr(words, "BASE", git("rev-parse", "HEAD~2").strip())
    (line,) = above(BY_NAME["subjects"], words.subjects(Tree.read(tmp_path)))
    assert line.endswith("s: " + "a" * 70)
    monkeypatch.setattr(words, "BASE", "fade")
    assert words.subjects(Tree.read(tmp_path)) == {}


def test_only_tracked_files_count(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "engine").mkdir()
    for name in ("kept", "gone", "junk"):
        (tmp_path / f"engine/{name}.py").write_text("x = 1\n")
    subprocess.run(["git", "-C", tmp_path, "add", "engine/kept.py", "engine/gone.py"], check=True)
    (tmp_path / "engine/gone.py").unlink()
    assert [module.path for module in Tree.read(tmp_path).modules] == ["engine/kept.py"]
    assert Tree.read(tmp_path, "tests").modules == ()
