"""What the pages name exists: links and their anchors, paths, flags, `make` targets. They name no machine's folder."""

import contextlib
import importlib
import io
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from deploy.cli import COMMANDS, main
from tests.docs.pages import PAGES, REPORTS, anchors, without_blocks
from tests.packages import PACKAGES, ROOT

# Flags of other programs, of benchmarks and of tools.
_FOREIGN = """--backend --base-url --build-arg --deadline --delete-emptydir-data --force --format --grace-period --ignore-daemonsets --list --max-concurrency --merge --no-deps --no-index --rollout-external-engine-addrs
    --num-prompts --parts --replicas --scenario --shm-size --small --target --wait"""
FOREIGN = frozenset(_FOREIGN.split())
TOP = (
    "engine",
    "disagg",
    "router",
    "bootstrap_server",
    "transfer_backends",
    "service",
    "deploy",
    "planner",
    "tandem",
    "tests",
)
PATH = re.compile(rf"`((?:{'|'.join((*TOP, 'tools', 'benchmarks', 'docs'))})/[\w./*-]*)`")
MADE_BY_RUNS = ("docs/reports/gpu_check.json",)


@pytest.mark.parametrize("page", [*PAGES, *REPORTS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"(?:\]\(|src=\"|srcset=\")([^)\"\s]+)", without_blocks(page.read_text())):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = page if not name else (page.parent / name).resolve()
        assert file.exists() or str(file.relative_to(ROOT)) in MADE_BY_RUNS, target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_paths_exist(page: Path) -> None:
    for path in PATH.findall(page.read_text()):
        assert any(ROOT.glob(path.rstrip("/"))) or path in MADE_BY_RUNS, path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_flags_exist(page: Path) -> None:
    flags = _flags()
    for flag, more in re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]*)(\*|\[[a-z-]+\])?", page.read_text()):
        if more == "*":
            assert any(name.startswith(flag) for name in flags), flag
        elif more:
            assert {flag, flag + more.strip("[]")} <= flags, flag
        else:
            assert flag in flags | FOREIGN, flag


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_parse(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    runs = re.findall(r"^ *make run ARGS=\"(.*)\"", text, re.MULTILINE)
    lines = [*re.findall(r"^ *(?:\.venv/bin/)?tandem (.*)$", text, re.MULTILINE), *(f"up {args}" for args in runs)]
    for line in lines:
        command, *argv = [word for word in shlex.split(line, comments=True) if word not in ("...", "&")]
        importlib.import_module(COMMANDS[command].module).build_parser().parse_strict(argv)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_defaults_are_those_of_the_flags(page: Path) -> None:
    for flag, value in _stated_defaults(page.read_text()):
        known = _defaults().get(flag)
        assert known is None or float(value.replace(",", "")) in known, (flag, value, known)


def test_named_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:`|^ {4})make ([a-z][a-z0-9-]+)", page.read_text(), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"


def test_the_map_names_every_folder() -> None:
    rows = [line for line in (ROOT / "docs/architecture.md").read_text().splitlines() if line.startswith("| `")]
    for package in PACKAGES:
        for init in (ROOT / package).glob("*/__init__.py"):
            name = init.parent.name
            assert any(
                f"`{package}/{name}/`" in row or (f"| `{package}/` |" in row and f"`{name}/`" in row) for row in rows
            ), f"{package}/{name}/"


def test_reports_name_no_folder_of_a_machine() -> None:
    for report in (ROOT / "docs" / "reports").glob("*.*"):
        if report.suffix in (".md", ".json"):
            assert not re.findall(r"[\s\"'`=:](?:/work|/home|/root|/Users)/\S*", report.read_text()), report.name


def _stated_defaults(text: str) -> Iterator[tuple[str, str]]:
    """Yield (flag, default) of "`--flag` (2.0)", "`--flag`, 3)" and of tables with a column of defaults."""
    number = r"([0-9](?:[0-9.,]*[0-9])?)"
    yield from re.findall(rf"`(--[a-z0-9-]+)`(?: \(|, ){number}(?= s\)|\)| s;|;)", text)
    yield from re.findall(rf"^\| `(--[a-z0-9-]+)` {number} \|", text, re.MULTILINE)
    for cell, values in re.findall(r"^\| (`--[^|]*`) \| ([0-9][0-9., ]*)(?=[:|])", text, re.MULTILINE):
        flags = re.findall(r"`(--[a-z0-9-]+)`", cell)
        defaults = values.strip().split(", ")
        yield from zip(flags, defaults * (len(flags) // len(defaults)), strict=True)


@cache
def _help() -> str:
    """What every `tandem` command prints about its flags, one flag a line."""
    text = io.StringIO()
    for command in COMMANDS:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            main([command, "--help", "all"])
    return re.sub(r"\n {20,}", " ", re.sub(r"-\n\s+", "-", text.getvalue()))


@cache
def _flags() -> frozenset[str]:
    return frozenset(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", _help()))


@cache
def _defaults() -> dict[str, set[float]]:
    """Numeric defaults by flag, of all commands that have it."""
    found: defaultdict[str, set[float]] = defaultdict(set)
    for flag, described in re.findall(r"^  (--[a-z][a-z0-9-]*)(.*)$", _help(), re.MULTILINE):
        default = re.search(r"default: ([0-9]+(?:\.[0-9]+)?)[;)]", described)
        if default:
            found[flag].add(float(default[1]))
    return dict(found)
