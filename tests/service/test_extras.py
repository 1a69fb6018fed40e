"""A missing module is one line with the extra that brings it, wherever it is missed."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploy.cli import COMMANDS, main, operating_error
from planner.report import check_plot
from router.pool.pod_watch import connect
from service.extras import MODULES, ON_USE, install, missing_module, require
from service.flags import ConfigError
from service.telemetry.exporters import OtlpExporter
from tests.packages import ROOT
from transfer_backends.engines import wheels

Block = Callable[..., None]
PLAN = ["plan", "--model-path", str(ROOT / "docs/tiny-qwen3.5-moe"), "--gpu", "H200"]
PYTHON = ("llm", "async_llm", "params", "asgi")  # but Cluster, whose process says it
NIXL = ("nixl", "nixl_cu12", "nixl_cu13")


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Block:
    """Makes modules of this process look as if they were not installed; torch is one for CPUs."""
    monkeypatch.setattr(wheels, "installed_torch", lambda: "2.13.0+cpu")

    def blocked(*names: str) -> None:
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return blocked


@pytest.mark.parametrize(
    ("names", "argv", "said"),
    [
        (("torch",), ["serve"], "torch is not installed; run: pip install 'tandem-serve[engine]'"),
        (
            ("torch", "re2"),
            ["up", "--unified"],
            "torch, re2 are not installed; run: pip install 'tandem-serve[engine]'",
        ),
        (
            ("torch", *NIXL),
            ["serve", "--disaggregation-mode", "prefill"],
            "torch, nixl are not installed; run: pip install 'tandem-serve[engine,nixl-cpu]'",
        ),
        (NIXL, ["up"], "nixl is not installed; run: pip install 'tandem-serve[nixl-cpu]'"),
        (
            ("mooncake",),
            ["up", "--transfer-backend", "mooncake"],
            "mooncake is not installed; run: pip install 'tandem-serve[mooncake-cpu]'",
        ),
        (("re2",), PLAN, "re2 is not installed; run: pip install 'tandem-serve[plan]'"),
    ],
)
def test_a_command_without_its_modules_names_the_extras(
    names: tuple[str, ...], argv: list[str], said: str, block: Block, capsys: pytest.CaptureFixture[str]
) -> None:
    block(*names)
    assert main(argv) == 1
    assert capsys.readouterr().err == f"tandem {argv[0]}: error: {said}\n"


# Of a process in which no module of an extra can be imported, whatever this one has imported before.
BARE = """
import importlib.abc, sys
from service.extras import MODULES, ON_USE
LACKING = {name for table in (MODULES, ON_USE) for names in table.values() for one in names for name in one.split("|")}
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in LACKING - {"opentelemetry"}:  # fastapi brings its api
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
from deploy.cli import COMMANDS, main
for name in COMMANDS:
    try:
        main([name, "--help"])
    except SystemExit as end:
        print(name, end.code, file=sys.stderr)
for argv in (["serve"], ["up"], PLAN):
    main(argv)
import tandem
for name in ("LLM", "AsyncLLM", "SamplingParams", "asgi"):
    try:
        getattr(tandem, name)
    except ImportError as error:
        print(error, file=sys.stderr)
"""


def test_a_bare_installation_has_help_and_names_extras() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"PLAN = {PLAN}{BARE}"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    said = done.stderr.splitlines()
    assert said[: len(COMMANDS)] == [f"{name} 0" for name in COMMANDS]
    commands, attributes = said[len(COMMANDS) :][:3], said[len(COMMANDS) + 3 :]
    for (name, extra), line in zip(
        [("serve", "engine"), ("up", "engine,nixl"), ("plan", "plan")], commands, strict=True
    ):
        assert re.fullmatch(
            rf"tandem {name}: error: .* are not installed; run: pip install 'tandem-serve\[{extra}.*", line
        )
    assert [line.partition(":")[0] for line in attributes] == [f"tandem.{module}" for module in PYTHON]
    assert all(line.endswith(" is not installed; run: pip install 'tandem-serve[engine]'") for line in attributes)


HIDDEN = """
import tandem
try:
    tandem.LLM
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("package", ["deploy", "engine", "service"])
def test_a_file_of_the_user_that_hides_a_package_is_named(package: str, tmp_path: Path) -> None:
    hider, script = tmp_path / f"{package}.py", tmp_path / "script.py"
    hider.write_text("")
    script.write_text(HIDDEN)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout.partition(": ")[2] == f"{hider} hides Tandem's package '{package}'; rename that file\n"


def test_a_terminal_without_its_editor_names_the_extra(
    block: Block, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block("prompt_toolkit")
    with monkeypatch.context() as terminal:
        terminal.setattr("sys.stdin.isatty", lambda: True)
        terminal.setattr("sys.stdout.isatty", lambda: True)
        assert main(["chat"]) == 1
    said = "prompt_toolkit is not installed; run: pip install 'tandem-serve[chat]'"
    assert capsys.readouterr().err == f"tandem chat: error: {said}\n"


async def test_discovery_without_kubernetes_names_the_extra(block: Block) -> None:
    block("kubernetes", "kubernetes.aio.client", "kubernetes.aio.config")
    with pytest.raises(
        ConfigError, match=r"^--service-discovery: kubernetes.* run: pip install 'tandem-serve\[k8s\]'$"
    ):
        await connect(namespace=None)


def test_spans_without_opentelemetry_name_the_extra(block: Block) -> None:
    block("opentelemetry")
    with pytest.raises(ConfigError, match=r"^--otlp-traces-endpoint: .* run: pip install 'tandem-serve\[otel\]'$"):
        OtlpExporter("http://127.0.0.1:1", process="router")


def test_a_picture_without_matplotlib_names_the_extra(block: Block) -> None:
    block("matplotlib.figure")
    with pytest.raises(ConfigError, match=r"^--plot: matplotlib.* run: pip install 'tandem-serve\[plan\]'$"):
        check_plot("x.png")


def test_a_module_that_is_missed_on_use_is_no_traceback() -> None:
    error = ModuleNotFoundError("No module named 'gguf.quants'", name="gguf.quants")
    assert operating_error(error) == "gguf is not installed; run: pip install 'tandem-serve[engine]'"
    assert missing_module(ModuleNotFoundError("No module named 'ours'", name="ours")) is None
    assert operating_error(ImportError("cannot import name 'x' from 'deploy'", name="deploy")) is None


def test_nothing_is_required_of_what_is_there(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    require("engine", *wheels.extras_of("nixl"), "chat", "k8s", "otel", "plan")
    block("nixl")  # a wheel for one CUDA serves as well
    require("nixl-cpu")
    monkeypatch.setattr(wheels, "installed_torch", lambda: "2.13.0")
    assert (wheels.extras_of("nixl"), wheels.extras_of("fake")) == (("nixl-cu13",), ())


def test_every_module_belongs_to_a_requirement_of_its_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    distributions = metadata.packages_distributions()
    for extra, names in [*MODULES.items(), *ON_USE.items()]:
        required = {Requirement(line).name.lower() for line in extras[extra]}
        for alternatives in names:
            installed = {name: distributions.get(name, []) for name in alternatives.split("|")}
            brought = {found.lower() for name, of in installed.items() for found in (name, *of)}
            assert any(one.startswith(other) for one in required for other in brought), (extra, alternatives)
    assert install("engine", "k8s") == "pip install 'tandem-serve[engine,k8s]'"
