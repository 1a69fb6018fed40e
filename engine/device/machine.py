"""Machine facts of a worker: C kernels, arithmetic kind, huge pages."""

import logging
import os
from importlib.util import find_spec
from pathlib import Path

from engine.config import EngineConfig, ModelFlags
from engine.kernels.build import (
    DISABLE_VARIABLE,
    BuildError,
    CpuKindError,
    NoCompilerError,
    check_buildable,
    cpu_kinds,
)
from engine.kernels.linear import linear_kernel
from engine.kernels.paged_attention import DECODE as PAGED_DECODE
from service.flags import ConfigError

log = logging.getLogger(__name__)
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
TORCH = "torch"


def machine_facts(device: str, dtype: str, *, huge_pages: Path = HUGE_PAGES) -> dict[str, str | None]:
    """Facts for /server_info.

    - c_kernels: "built", "no compiler", "failed", "off" (by environment), "unused" (GPU)
    - cpu_kind: see build.py, or "torch"
    - huge_pages: "always", "madvise", "never", or None
    """
    if device != "cpu":
        return {"c_kernels": "unused", "c_kernels_error": None, "cpu_kind": None, "huge_pages": None}
    state, error = _c_kernels()
    return {
        "c_kernels": state,
        "c_kernels_error": error,
        "cpu_kind": cpu_kind(dtype),
        "huge_pages": _chosen(huge_pages),
    }


def cpu_kind(dtype: str) -> str:
    """The C kernels' arithmetic kind, or "torch". Raises CpuKindError."""
    if dtype == "bfloat16":
        kernel = linear_kernel()
        return TORCH if kernel is None else kernel.kind.label
    return cpu_kinds()[0].label if _c_kernels()[0] == "built" else TORCH


def _c_kernels() -> tuple[str, str | None]:
    if os.environ.get(DISABLE_VARIABLE) == "1":
        return "off", None
    try:
        check_buildable(PAGED_DECODE.path)  # decode attention has built it already, in fp32 too
    except NoCompilerError as error:
        return "no compiler", str(error)
    except BuildError as error:
        return "failed", str(error)
    return "built", None


def _chosen(file: Path) -> str | None:
    try:
        return file.read_text().partition("[")[2].partition("]")[0] or None
    except OSError:
        return None


def check_arithmetic(config: EngineConfig) -> None:
    """Log the kind of arithmetic. Raises ConfigError for arithmetic that this machine cannot do."""
    _log_kind(config)
    _check_sums(config)
    _check_integers(config)


def _log_kind(config: ModelFlags) -> None:
    """Raises ConfigError where the environment asks for arithmetic that this CPU lacks."""
    if config.device != "cpu":
        return
    try:
        log.info("CPU kernels: %s", cpu_kind(config.dtype))
    except CpuKindError as error:
        raise ConfigError(str(error)) from None


def _check_sums(config: EngineConfig) -> None:
    """Raises ConfigError if --reduce-units cannot give equal bits for every --tp-size."""
    if not config.reduce_units or config.device != "cpu":
        return
    if config.dtype != "bfloat16":
        raise ConfigError(
            f"--reduce-units {config.reduce_units}: only bf16 products have the same bits on any number of ranks; give "
            f"--dtype bfloat16 in place of {config.dtype}, or leave it out"
        )
    if linear_kernel() is None:
        raise ConfigError(
            f"--reduce-units {config.reduce_units}: needs the C kernel of bf16 products, which this machine cannot build (its "
            "log says why); install a C compiler, or leave it out"
        )


def _check_integers(config: ModelFlags) -> None:
    """Raises ConfigError where --quantization would give the same answers at bf16's cost."""
    if not config.quantization:
        return
    if config.device == "cpu" and linear_kernel() is None:
        raise ConfigError(
            f"--quantization {config.quantization}: needs the C kernel of integer products, which this machine cannot build (its "
            "log says why); install a C compiler, or leave it out"
        )
    if config.device == "cuda" and find_spec("triton") is None:
        raise ConfigError(
            f"--quantization {config.quantization}: needs Triton's kernels of integer products; install triton, or leave it out"
        )
