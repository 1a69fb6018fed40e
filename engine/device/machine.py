"""What a worker can use of its machine: C kernels, the CPU's arithmetic, huge pages."""

import os
from pathlib import Path

from engine.kernels.build import DISABLE_VARIABLE, BuildError, NoCompilerError, check_buildable
from engine.kernels.linear import linear_kernel
from engine.kernels.paged_decode import SOURCE as PAGED_DECODE

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
BF16 = "AVX512-BF16"


def machine_facts(device: str, dtype: str, *, huge_pages: Path = HUGE_PAGES) -> dict[str, str | None]:
    """Return facts for /server_info; `device`, `dtype`: resolved.

    `c_kernels`: "built", "no compiler", "failed", "off" (by the environment), or "unused" (on a GPU).
    `cpu_lacks`: arithmetic that the kernels need and this CPU lacks. `huge_pages`: "always", "madvise", "never", None: unknown.
    """
    if device != "cpu":
        return {"c_kernels": "unused", "c_kernels_error": None, "cpu_lacks": None, "huge_pages": None}
    state, error = _c_kernels()
    lacks = state == "built" and dtype == "bfloat16" and linear_kernel() is None
    return {
        "c_kernels": state,
        "c_kernels_error": error,
        "cpu_lacks": BF16 if lacks else None,
        "huge_pages": _chosen(huge_pages),
    }


def _c_kernels() -> tuple[str, str | None]:
    if os.environ.get(DISABLE_VARIABLE) == "1":
        return "off", None
    try:
        check_buildable(PAGED_DECODE)  # decode attention has built it already, in fp32 too
    except NoCompilerError as error:
        return "no compiler", str(error)
    except BuildError as error:
        return "failed", str(error)
    return "built", None


def _chosen(file: Path) -> str | None:
    """Return the word in brackets, as in "always [madvise] never"."""
    try:
        return file.read_text().partition("[")[2].partition("]")[0] or None
    except OSError:
        return None
