"""The register of features: what it finds wrong with itself, and what it counts. Each rule is red on a planted tree."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.house.planted import plant
from tests.packages import ROOT
from tools.house.register import FILE, Register, inconsistencies, weight_of_tests, woven
from tools.house.tree import Tree

FILES = {
    "engine/core/scheduler.py": "def plan(adapters):\n    return adapters, max_lora_rank\n",
    "engine/core/memory.py": '"""Adapters: Lora, explorations."""\n',
    "engine/lora/__init__.py": "",
    "engine/lora/bank.py": "adapters = 1\nlora = 2\n",
    "engine/lora/peft_config.py": "x = 1\n",
    "engine/ranks/group.py": "rank = 1\n",
    "engine/ranks/nodes.py": "nnodes = 1\n",
    "tests/lora/test_bank.py": "\n" * 12,
    "docs/reports/gpu.md": "",
}
LORA = {
    "flag": "--enable-lora",
    "rooms": ["engine/lora/"],
    "words": ["loras?", "adapters?"],
    "hardware": [{"what": "H200", "date": date(2026, 11, 26), "report": "docs/reports/gpu.md"}],
    "gain": {"figure": "1.2", "report": "docs/reports/gpu.md"},
    "tests": ["tests/lora/*.py"],
}
CPU = {"flag": "", "words": [], "hardware": [{"what": "CPU"}], "gain": "none on record", "tests": []}
RANKS = CPU | {"base": True, "rooms": ["engine/ranks/"], "words": ["rank"]}
NODES = CPU | {"rooms": ["engine/ranks/nodes.py"]}


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return value.isoformat() if isinstance(value, date) else json.dumps(value)


def tree(root: Path, *, more: str = "", base: tuple[str, ...] = ("engine/core/",), **features: Any) -> Tree:
    """FILES, `more` among them, and a register of three features, or other ones."""
    features = {"lora": LORA, "ranks": RANKS, "nodes": NODES} | features
    files = FILES | ({more: ""} if more else {})
    return plant(root, files | {FILE: f"base = {toml([*base])}\nfeature = {toml(features)}\n"})


def test_a_register_that_says_what_the_tree_says_has_no_findings(tmp_path: Path) -> None:
    assert inconsistencies(tree(tmp_path)) == {}


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        (
            {"more": "engine/new/part.py"},
            "engine/new/part.py belongs to no feature and to no folder of the base",
        ),
        ({"base": ("engine/co*/", "engine/old/")}, "base: engine/old/ matches no file"),
        (
            {"other": CPU | {"rooms": ["engine/lora/p*.py"]}},
            "engine/lora/peft_config.py is owned twice: by lora and other",
        ),
        ({"other": CPU | {"rooms": ["engine/other.py"]}}, "other: rooms: engine/other.py matches no file"),
        ({"other": CPU | {"rooms": ["engine/c*.py"]}}, "other: rooms: engine/c*.py matches no file"),
        ({"lora": LORA | {"tests": ["tests/lora/"]}, "other": CPU | {"rooms": [], "tests": ["tests/x/"]}}, "tests/x/"),
        ({"other": CPU | {"rooms": [], "words": ["gone"]}}, "other: words: gone is in no name of the product"),
        ({"lora": LORA | {"gain": {"figure": "2", "report": "docs/no.md"}}}, "lora: there is no report docs/no.md"),
        ({"lora": LORA | {"hardware": [{"what": "H200"}]}}, "lora: hardware H200 needs a date and a report"),
        ({"lora": LORA | {"hardware": []}}, "lora: hardware names nothing that has run it"),
    ],
)
def test_a_contradiction_is_a_finding(tmp_path: Path, changes: dict[str, Any], finding: str) -> None:
    (found,) = inconsistencies(tree(tmp_path, **changes))
    assert finding in found


@pytest.mark.parametrize("field", ["gain", "rooms", "date"])
def test_a_wrong_field_is_an_error(tmp_path: Path, field: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        Register(tree(tmp_path, lora=LORA | {field: "unknown"}))


def test_a_feature_takes_its_files_out_of_the_base_path(tmp_path: Path) -> None:
    owners = Register(tree(tmp_path)).owners
    assert owners["engine/ranks/nodes.py"] == ["nodes"]
    assert owners["engine/ranks/group.py"] == ["ranks"]
    assert "engine/core/memory.py" not in owners


def test_woven_lines_are_those_outside_the_rooms_that_name_a_feature(tmp_path: Path) -> None:
    found = tree(tmp_path)
    assert woven(found) == {"lora": 3, "nodes": 0}  # not "explorations"; `ranks` belongs to the base path
    assert Register(found).woven["lora"] == {"engine/core/scheduler.py": 2, "engine/core/memory.py": 1}
    assert Register(found).woven["ranks"] == {"engine/core/scheduler.py": 1}


def test_tests_are_weighed_against_own_lines(tmp_path: Path) -> None:
    found = tree(tmp_path)
    assert weight_of_tests(found)["lora"] == 100 * 12 // 3
    assert "| lora | 3 | 3 (2) | 12 | 400 | H200 2026-11-26 | 1.2 (docs/reports/gpu.md) |" in Register(found).table()


def test_each_feature_of_this_repository_has_words_and_rooms() -> None:
    features = msgspec.toml.decode((ROOT / FILE).read_text())["feature"]
    assert [name for name, feature in features.items() if not (feature["words"] and feature["rooms"])] == []
