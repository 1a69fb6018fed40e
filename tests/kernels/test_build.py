"""Every kernel compiles for each kind of CPU that its source tells apart; how a library gets into the cache and out of it."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels import build
from engine.kernels.ahead import build_all
from engine.kernels.build import Kind, flags_of
from tests.cells import some

SOURCES = sorted(Path(build.__file__).with_name("csrc").glob("*.c"))
ARM = (Kind.NEON, Kind.NEON_BF16)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", some(Kind, tried=[*ARM, max(Kind)]), ids=lambda kind: kind.label)
def test_a_kernel_compiles_for_each_kind_of_cpu(source, kind):
    flags = [
        *build.BASE_FLAGS,
        *flags_of(kind, {"avx512vbmi"}),
        "-Wall",
        "-Werror=implicit",
        "-fsyntax-only",
    ]
    compiler = "aarch64-linux-gnu-gcc" if kind in ARM else "cc"
    done = subprocess.run([compiler, *flags, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }\n")
    return source


def test_flags_that_were_wished_for_and_do_not_compile_are_named(source, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(build, "flag_sets", lambda kind: [("-march=no-such-cpu",), ()])
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING, logger="engine.kernels.build"):
        library = build.load_library(source)
    assert library is not None and library.one() == 1
    (record,) = caplog.records
    assert "-march=no-such-cpu" in record.getMessage() and "one.c" in record.getMessage()


def test_of_three_processes_at_once_one_builds(source, tmp_path):
    compiler, runs = tmp_path / "counting-cc", tmp_path / "runs"
    compiler.write_text(f'#!/bin/sh\necho run >> {runs}\nexec cc "$@"\n')
    compiler.chmod(0o700)
    code = f"import pathlib, engine.kernels.build as b; print(b.load_library(pathlib.Path({str(source)!r})).one())"
    cache = tmp_path / "cache"
    env = {**os.environ, build.CACHE_VARIABLE: str(cache), "CC": str(compiler)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=env, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    try:
        answers = [p.communicate(timeout=120)[0].strip() for p in running]
    finally:
        for p in running:
            p.kill()
            p.communicate()  # closes its pipe
    assert answers == ["1"] * 3
    assert [p.suffix for p in cache.iterdir()] == [".so"]
    assert runs.read_text() == "run\n"


def test_without_a_compiler_of_the_machine_s_that_of_the_package_builds(source, monkeypatch, tmp_path):
    package = tmp_path / "packages" / "ziglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        f"import os, sys\nassert sys.argv[1] == 'cc'\nos.execv({shutil.which('cc')!r}, ['cc', *sys.argv[2:]])\n"
    )
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(build.NoCompilerError, match="pip install ziglang"):
        build.check_buildable(source)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    assert build.load_library(source).one() == 1


def test_all_kernels_of_a_folder_are_built_ahead_and_those_that_fail_are_named(source, monkeypatch, tmp_path):
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "broken.c").write_text("int one(void) {")
    (tmp_path / "two.c").write_text("int two(void) { return 2; }")
    assert build_all(tmp_path) == ["broken.c"]
    assert {p.name.partition("-")[0] for p in (tmp_path / "cache").iterdir()} == {"one", "two"}


def test_a_broken_library_is_removed_and_built_again(source, monkeypatch, tmp_path):
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "first"))
    assert build.load_library(source) is not None
    (path,) = (tmp_path / "first").iterdir()
    broken = tmp_path / "second" / path.name
    broken.parent.mkdir(mode=0o700)
    broken.write_text("not a library")
    monkeypatch.setenv(build.CACHE_VARIABLE, str(broken.parent))
    assert build.load_library(source) is None and not broken.exists()
    assert build.load_library(source) is not None


def test_a_cache_directory_that_others_may_write_is_not_used(monkeypatch, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv(build.CACHE_VARIABLE, str(shared))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert build.cache_dir() == tmp_path / "mine" / "tandem" / "kernels"
