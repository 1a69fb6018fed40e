"""Rows of house.toml: what grew, what could be lower, and raises that nothing pays for."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.house.planted import plant
from tools.house.__main__ import RULES, main
from tools.house.ratchet import Row, Table, changes, check, dump, findings, parse, tightened
from tools.house.reach import SERVE
from tools.house.report import REPORT
from tools.house.tree import Rule

EXACT = Rule("widths", "parameters", "group them", lambda tree: {}, most=8)
BUDGET = Rule("lines", "lines", "take away as much", lambda tree: {}, aims={"all product": 100}, slack=20)


def rows(**limits: int) -> dict[str, Row]:
    return {key.replace("_", "/"): Row(limit) for key, limit in limits.items()}


def test_what_grew_is_a_finding_with_its_remedy() -> None:
    table = rows(engine_a=10)
    assert list(findings(EXACT, {"engine/a": 10, "engine/b": 8}, table)) == []
    assert list(findings(EXACT, {"engine/a": 11}, table)) == ["engine/a: 11 parameters, at most 10: group them"]
    assert list(findings(EXACT, {"engine/a": 10, "engine/b": 9}, table)) == [
        "engine/b: 9 parameters, at most 8: group them"
    ]


def test_a_row_that_is_too_high_is_a_finding() -> None:
    for lower in ({"engine/a": 9}, {"engine/a": 8}, {}):
        (found,) = findings(EXACT, lower, rows(engine_a=10))
        assert "engine/a" in found and "make house-tighten" in found


@pytest.mark.parametrize(
    ("value", "limit", "is_loose"), [(500, 520, False), (500, 521, True), (5000, 5100, False), (5000, 5101, True)]
)
def test_lines_have_slack(value: int, limit: int, is_loose: bool) -> None:
    assert bool(list(findings(BUDGET, {"engine": value}, rows(engine=limit)))) == is_loose


def test_tightening_lowers_rows_and_nothing_else() -> None:
    table = rows(engine_falls=12, engine_grows=9, engine_gone=20)
    values = {"engine/falls": 10, "engine/grows": 11, "engine/new": 15, "engine/small": 8}
    assert tightened(EXACT, values, table) == rows(engine_falls=10, engine_grows=9)
    assert tightened(EXACT, values, None) == rows(engine_falls=10, engine_grows=11, engine_new=15)
    assert tightened(BUDGET, {"engine": 491}, rows(engine=600)) == rows(engine=500)


def test_the_file_has_one_form() -> None:
    paid = Row(7, because="a part of its own", instead_of="abc")
    tables = {"widths": {"b": Row(9), "a": Row(12, because="a wire", issue=3)}, "lines": {"engine": paid}}
    text = dump((EXACT, BUDGET), tables)
    assert parse(text) == tables and text.index('"a"') < text.index('"b"')


# ---- raises, in a repository


def git(root: Path, *args: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@t")
    return subprocess.run(["git", "-C", root, *who, *args], check=True, capture_output=True, text=True).stdout


def commit(root: Path, table: Table, **files: str) -> str:
    (root / "house.toml").write_text(dump([BUDGET], {"lines": table}))
    plant(root, {f"{name}.py": text for name, text in files.items()})
    git(root, "add", "-A")
    git(root, "commit", "-qm", "x", "--allow-empty")
    return git(root, "rev-parse", "--short", "HEAD").strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Its house.toml has engine 100 and router 100; before, a commit removed forty lines."""
    git(tmp_path, "init", "-q")
    plant(tmp_path, {"a.py": "x = 1\n" * 50})
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    commit(tmp_path, rows(engine=100, router=100), a="x = 1\n" * 10)
    return tmp_path


def unpaid(root: Path, now: Mapping[str, Row]) -> list[str]:
    found = changes(root, {"lines": now})
    assert found is not None
    return [problem for change in found for problem in change.unpaid([BUDGET], root)]


def test_a_raise_says_why(root: Path) -> None:
    same = rows(engine=100, router=100)
    (problem,) = unpaid(root, same | rows(engine=130))
    assert "the working tree" in problem and '"engine" by 30' in problem
    assert unpaid(root, same | {"engine": Row(130, because="a part")}) != []
    assert unpaid(root, same | {"engine": Row(130, issue=3)}) != []
    assert unpaid(root, same | {"engine": Row(130, because="a part", issue=3)}) == []
    assert unpaid(root, same | rows(engine_new=10)) != []
    assert unpaid(root, same) == []


def test_a_reason_is_good_for_one_raise(root: Path) -> None:
    commit(root, {"engine": Row(130, because="a part", issue=3), "router": Row(100)})
    assert unpaid(root, {"engine": Row(140, because="a part", issue=3), "router": Row(100)}) != []
    assert unpaid(root, {"engine": Row(140, because="another", issue=3), "router": Row(100)}) == []


def test_a_raise_is_paid_by_falls_in_its_area(root: Path) -> None:
    assert unpaid(root, rows(engine=130, router=70)) == []
    assert unpaid(root, rows(engine=100, engine_core=30, router=70)) == []
    assert unpaid(root, rows(engine=130, router=71)) != []
    commit(root, rows(engine=100, tests=100))
    assert unpaid(root, rows(engine=130, tests=70)) != []


def test_a_commit_that_pays_removed_as_much(root: Path) -> None:
    before = commit(root, rows(engine=100, router=100), a="x = 1\n")  # nine lines less
    small, large = (Row(limit, because="a part", instead_of=before) for limit in (109, 110))
    assert unpaid(root, rows(router=100) | {"engine": small}) == []
    assert "removed 9 lines only" in unpaid(root, rows(router=100) | {"engine": large})[0]
    assert "no commit" in unpaid(root, rows(router=100) | {"engine": Row(101, "a part", "fade")})[0]


def test_a_table_of_no_rule_and_another_form_are_findings(tmp_path: Path) -> None:
    file = tmp_path / "house.toml"
    file.write_text("[lines]\nengine = 100\n")
    assert "one form" in check([BUDGET], {"lines": {"engine": 90}}, tmp_path)[0]
    file.write_text("[lanes]\nengine = 100\n")
    assert "[lanes] is a table of no rule" in check([BUDGET], {"lines": {}}, tmp_path)[0]


def test_the_program_fails_on_any_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = {path: "" for rule in RULES if rule.name == "none_branches" for path in rule.measure(plant(tmp_path, {}))}
    plant(tmp_path, {path.split(",")[0]: "" for path in base if path.startswith(("engine", "disagg", "router"))})
    plant(
        tmp_path,
        {
            SERVE: "add_flags(parser, Config)",
            REPORT: "",
            "engine/config.py": "class Config:\n    size: int = flag(1)\n",
        },
    )
    write = ["--report", str(tmp_path / REPORT)]
    main(["--tighten"], tmp_path)
    assert main(write, tmp_path) == 0
    assert main([], tmp_path) == 0
    plant(tmp_path, {"engine/core/memory.py": "x = 1\n" * 30})
    assert main([], tmp_path) == 1
    shown = capsys.readouterr().out
    assert "engine/core: 30 lines of Python and C, at most" in shown
    assert f"{REPORT}: it has 2 all product, the tree 32: run `make house`" in shown
    assert main(write, tmp_path) == 0
    assert " engine |" in (tmp_path / REPORT).read_text()
    main([], tmp_path)
    assert REPORT not in capsys.readouterr().out
