"""The scripts of examples/: short, and they run. Here with the shared engines; `make slow-tests` runs them as users do."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

import tandem
from tandem import LLM, AsyncLLM
from tests.packages import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 15


class Shared:
    """In place of an engine's class: its constructor gives one that lives on."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __call__(self, model: str, **flags: Any) -> "Shared":
        assert model == "smollm2"
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __enter__(self) -> Any:
        return self._engine

    def __exit__(self, *error: object) -> None:
        pass

    async def __aenter__(self) -> Any:
        return self._engine

    async def __aexit__(self, *error: object) -> None:
        pass


class OneWorker:
    """In place of a cluster: the server, with a client that the test closes."""

    def __init__(self, url: str, client: openai.OpenAI) -> None:
        self.url = url
        self.openai = lambda: client


def test_there_are_five_short_ones() -> None:
    assert len(EXAMPLES) == 5
    assert {path.name: n for path in EXAMPLES if (n := len(path.read_text().splitlines())) > MAX_LINES} == {}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(
    path: Path,
    llm: LLM,
    async_llm: AsyncLLM,
    server: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none") as client:
        for name, engine in (("LLM", llm), ("AsyncLLM", async_llm), ("Cluster", OneWorker(server, client))):
            monkeypatch.setattr(tandem, name, Shared(engine))
        monkeypatch.setattr(openai.resources.chat.completions.Completions, "create", _by_any_name)
        runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


_create = openai.resources.chat.completions.Completions.create


def _by_any_name(self: Any, *, model: str, **params: Any) -> Any:
    """The server has another model than the example's."""
    return _create(self, model="default", **params)  # type: ignore[call-overload]


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_as_users_start_it(path: Path, tmp_path: Path) -> None:
    command, env = [sys.executable, str(path)], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 10
