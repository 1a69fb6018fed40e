"""What the summary of `tandem up` says of a machine that lacks something."""

from pathlib import Path

import pytest

from deploy.launcher.display import shortfalls
from engine.device.machine import machine_facts
from engine.kernels import build

GOOD = {"c_kernels": "built", "c_kernels_error": None, "cpu_kind": "avx2", "huge_pages": "madvise"}
WHOLE_CPU = ("cpu", "float32")


def test_a_machine_that_has_all_is_not_mentioned():
    assert shortfalls([GOOD, GOOD, {}]) == []


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        ({"c_kernels": "no compiler"}, ["no C compiler", "several times slower", "apt-get install gcc libc6-dev"]),
        (
            {"c_kernels": "failed", "c_kernels_error": "gcc failed: stdlib.h"},
            ["gcc failed: stdlib.h", "apt-get install gcc libc6-dev"],
        ),
        ({"c_kernels": "off"}, ["TANDEM_NO_C_KERNELS=1", "unset TANDEM_NO_C_KERNELS"]),
        ({"huge_pages": "never"}, ["No huge pages", "1.7 times", "/sys/kernel/mm/transparent_hugepage/enabled"]),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_it_says_what_is_missing_what_it_costs_and_what_mends_it(fact: dict[str, str], words: list[str]):
    (line,) = shortfalls([GOOD | fact, GOOD | fact, GOOD])
    assert all(word in line for word in words), line


def test_facts_of_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'error: no stdlib.h here' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    facts = machine_facts(*WHOLE_CPU)
    assert facts["c_kernels"] == "failed" and "no stdlib.h here" in str(facts["c_kernels_error"])
    assert facts["cpu_kind"] == "torch"


def test_facts_of_kernels_that_are_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(build.DISABLE_VARIABLE, "1")
    facts = machine_facts(*WHOLE_CPU)
    assert (facts["c_kernels"], facts["cpu_kind"]) == ("off", "torch")


@pytest.mark.parametrize("word", ["always", "madvise", "never"])
def test_facts_of_huge_pages(tmp_path: Path, word: str):
    file = tmp_path / "enabled"
    file.write_text(" ".join(f"[{name}]" if name == word else name for name in ("always", "madvise", "never")))
    assert machine_facts(*WHOLE_CPU, huge_pages=file)["huge_pages"] == word
    assert machine_facts(*WHOLE_CPU, huge_pages=tmp_path / "none")["huge_pages"] is None


def test_a_gpu_needs_none_of_it():
    assert shortfalls([dict(machine_facts("cuda", "bfloat16"))]) == []
