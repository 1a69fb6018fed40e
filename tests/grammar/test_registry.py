"""The choice of a backend: imported when asked for only, and a missing library is one line that names the flag."""

import subprocess
import sys

import pytest

from engine.config import GRAMMAR_BACKENDS
from engine.grammar.compiler import make_compiler
from service.flags import ConfigError
from tests.frontend.conftest import byte_tokenizer


@pytest.mark.parametrize("backend", GRAMMAR_BACKENDS)
def test_every_choice_of_the_flag_is_there(backend: str) -> None:
    compiler = make_compiler(backend, byte_tokenizer(), vocab_size=260, eos_ids=[256])
    assert (compiler is None) == (backend == "none")


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_a_missing_library_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.delitem(sys.modules, f"engine.grammar.{backend}_backend", raising=False)
    monkeypatch.setitem(sys.modules, backend, None)
    with pytest.raises(ConfigError, match=rf"^--grammar-backend {backend}: .*pip install {backend}") as error:
        make_compiler(backend, byte_tokenizer(), vocab_size=260, eos_ids=[256])
    assert "\n" not in str(error.value)


def test_no_library_is_imported_before_it_is_asked_for() -> None:
    code = "import engine.grammar.compiler, engine.grammar.queue, sys; print({'xgrammar', 'llguidance', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
