"""The CUDA driver's library for machines without one: it records what it is called with. Nothing runs on a GPU."""

import shutil
import subprocess
from pathlib import Path

DRIVER = """
#include <stddef.h>
static int sets, retained = -1;
static void *current, *freed;
static size_t allocated;
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 70 + ordinal; return ordinal > 1 ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { retained = device; *context = (void *)0x123456789abc; return 0; }
int cuCtxSetCurrent(void *context) { sets++; current = context; return 0; }
int cuMemAlloc_v2(void **at, size_t size) { allocated = size; *at = (void *)0x7f0000000000; return size > 1ul << 30 ? 2 : 0; }
int cuMemFree_v2(void *at) { freed = at; return 0; }
size_t seen_allocated(void) { return allocated; }
void *seen_freed(void) { return freed; }
int seen_sets(void) { return sets; }
int seen_device(void) { return retained; }
void *seen_context(void) { return current; }
"""


def build_driver(folder: Path) -> str:
    """Return the path of the library, which has the driver's own name."""
    return build_library(folder, DRIVER, "libcuda.so.1")


def build_library(folder: Path, source: str, name: str) -> str:
    """Return the path of the library."""
    (folder / "source.c").write_text(source)
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "the tests need a C compiler (deploy/system_packages.sh tests)"
    command = [compiler, "-shared", "-fPIC", "source.c", "-o", name]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    return str(folder / name)
