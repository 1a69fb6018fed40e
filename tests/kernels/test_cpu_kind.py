"""Which kind of arithmetic a CPU's features give, and what the environment may ask for."""

from pathlib import Path

import pytest

from engine.kernels import build
from engine.kernels.build import KIND_VARIABLE, CpuKindError, Kind, flags_of, kinds_of, kinds_to_try
from engine.model_files.model_config import WIDE_MODEL_PATH
from service.flags import ConfigError
from tests.engine.engine_in_process import EngineInProcess

HASWELL = {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe", "popcnt"}
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
ZEN4 = SKYLAKE | {"avx512_bf16", "avx512vbmi"}
SAPPHIRE = ZEN4 | {"amx_tile", "amx_bf16", "amx_int8"}


@pytest.mark.parametrize(
    ("machine", "features", "best"),
    [
        ("x86_64", SAPPHIRE, Kind.AMX),
        ("x86_64", ZEN4, Kind.AVX512_BF16),
        ("x86_64", SKYLAKE, Kind.AVX512),
        ("x86_64", HASWELL, Kind.AVX2),
        ("x86_64", HASWELL - {"fma"}, Kind.GENERIC),
        ("aarch64", {"asimd", "bf16"}, Kind.NEON_BF16),
        ("aarch64", {"asimd"}, Kind.NEON),
        ("arm64", set(), Kind.NEON),
        ("riscv64", {"avx2"}, Kind.GENERIC),
    ],
)
def test_the_best_kind_is_the_first(machine: str, features: set[str], best: Kind) -> None:
    kinds = kinds_of(machine, features)
    assert kinds[0] is best and kinds[-1] is Kind.GENERIC and kinds == sorted(kinds, reverse=True)


def test_compiler_flags_depend_on_the_kind_of_cpu_alone() -> None:
    assert flags_of(Kind.AVX2, SAPPHIRE) == flags_of(Kind.AVX2, HASWELL)
    assert "-mavx512vbmi" in flags_of(Kind.AVX512_BF16, ZEN4)
    assert "-mavx512vbmi" not in flags_of(Kind.AVX512_BF16, ZEN4 - {"avx512vbmi"})


def test_a_lower_kind_can_be_forced_and_those_below_it_are_next() -> None:
    assert kinds_to_try("x86_64", SKYLAKE, "avx2") == [Kind.AVX2, Kind.GENERIC]
    assert kinds_to_try("x86_64", SKYLAKE, None)[0] is Kind.AVX512


@pytest.mark.parametrize("asked", ["amx", "neon", "sse"])
def test_a_kind_that_the_cpu_lacks_is_refused_with_those_it_has(asked: str) -> None:
    with pytest.raises(
        CpuKindError, match=rf"{KIND_VARIABLE}={asked}: this CPU \(x86_64\) has avx2, generic; name one"
    ):
        kinds_to_try("x86_64", HASWELL, asked)


def test_a_worker_refuses_it_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KIND_VARIABLE, "abacus")
    with pytest.raises(ConfigError, match=f"{KIND_VARIABLE}=abacus: this CPU"):
        EngineInProcess(WIDE_MODEL_PATH, dtype="float32")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("flags\t\t: fma avx2\n\nflags\t\t: avx2 amx_tile\n", {"avx2"}),  # what one core lacks no thread may use
        ("Features\t: fp asimd bf16\n", {"fp", "asimd", "bf16"}),
        ("hart : 0\n", set()),
    ],
)
def test_features_are_those_of_all_cores(
    text: str, found: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(build, "CPU_INFO", tmp_path / "cpuinfo")
    assert build.cpu_features.__wrapped__() == found
    monkeypatch.setattr(build, "CPU_INFO", tmp_path / "none")
    assert build.cpu_features.__wrapped__() == set()


def test_a_compiler_that_does_not_know_a_kind_builds_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "kind.c"
    source.write_text('#include "kind.h"\nint kind(void) { return VECTOR_KIND; }\n')
    (tmp_path / "kind.h").write_text((Path(build.__file__).with_name("csrc") / "kind.h").read_text())
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(build, "cpu_kinds", lambda best=None: [Kind.NEON_BF16, Kind.AVX2, Kind.GENERIC])
    library = build.load_library(source)
    assert library is not None and library.kind() == (
        Kind.AVX2 if build.platform.machine() == "x86_64" else Kind.NEON_BF16
    )
