"""Every kernel compiles for each kind of CPU that its source tells apart, and one that does so only without wishes says so."""

import logging
import subprocess
from pathlib import Path

import pytest

from engine.kernels import build

SOURCES = sorted(Path(build.__file__).parent.glob("*.c"))
KINDS = {"amx": "sapphirerapids", "bf16": "cooperlake", "avx512": "skylake-avx512", "avx2": "haswell", "sse": "x86-64"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_compiles_for_each_kind_of_cpu(source, kind):
    flags = [*build.BASE_FLAGS, "-fopenmp", f"-march={KINDS[kind]}", "-Wall", "-Werror=implicit", "-fsyntax-only"]
    done = subprocess.run(["cc", *flags, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_flags_that_were_wished_for_and_do_not_compile_are_named(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(build, "FLAG_SETS", (("-march=no-such-cpu",), ()))
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }\n")
    with caplog.at_level(logging.WARNING, logger="engine.kernels.build"):
        library = build.load_library(source)
    assert library is not None and library.one() == 1
    (record,) = caplog.records
    assert "-march=no-such-cpu" in record.getMessage() and "one.c" in record.getMessage()
