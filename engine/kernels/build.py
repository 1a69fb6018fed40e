"""Build of C kernels at first use, with a per-user cache.

A file name hashes source, headers, compiler and flags, so a changed source or shared home never
loads a wrong one. Flags are of a CPU kind, for equal bits on all its machines.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeVar

KIND_VARIABLE = "TANDEM_CPU_KIND"


class Kind(IntEnum):
    """`enum kind` of kind.h: fixed compiler flags, for equal bits on all machines of a kind."""

    GENERIC = 1
    NEON = 2
    NEON_BF16 = 3
    AVX2 = 4
    AVX512 = 5
    AVX512_BF16 = 6
    AMX = 7

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", "-")


class CpuKindError(ValueError):
    """The requested kind does not exist, or this CPU lacks it."""


class _Needs(NamedTuple):
    machine: str
    features: frozenset[str]  # from /proc/cpuinfo
    flags: tuple[str, ...]


_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe", "-mpopcnt")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512cd")
_HAS_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe", "popcnt"})
_HAS_AVX512 = _HAS_AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
_HAS_BF16 = _HAS_AVX512 | {"avx512_bf16"}
# Byte lookup for 8-bit integers: faster, with the same bits.
_LOOKUP, _HAS_LOOKUP = "-mavx512vbmi", "avx512vbmi"

# Flags per feature instead of -march=, which old compilers may not know. Best first.
_KINDS = {
    Kind.AMX: _Needs(
        "x86_64", _HAS_BF16 | {"amx_tile", "amx_bf16"}, (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
    ),
    Kind.AVX512_BF16: _Needs("x86_64", _HAS_BF16, (*_AVX512, "-mavx512bf16")),
    Kind.AVX512: _Needs("x86_64", _HAS_AVX512, _AVX512),
    Kind.AVX2: _Needs("x86_64", _HAS_AVX2, _AVX2),
    Kind.NEON_BF16: _Needs("aarch64", frozenset({"asimd", "bf16"}), ("-march=armv8.2-a+bf16",)),
    Kind.NEON: _Needs("aarch64", frozenset(), ("-march=armv8-a",)),
    Kind.GENERIC: _Needs("", frozenset(), ()),
}


def kinds_of(machine: str, features: AbstractSet[str]) -> list[Kind]:
    """Kinds by `platform.machine` and /proc/cpuinfo's features, best first."""
    own = {"arm64": "aarch64", "AMD64": "x86_64"}.get(machine, machine)
    return [kind for kind, needs in _KINDS.items() if needs.machine in ("", own) and needs.features <= features]


def flags_of(kind: Kind, features: AbstractSet[str]) -> tuple[str, ...]:
    looks_up = kind >= Kind.AVX512_BF16 and _HAS_LOOKUP in features
    return (*_KINDS[kind].flags, _LOOKUP) if looks_up else _KINDS[kind].flags


def kinds_to_try(machine: str, features: AbstractSet[str], forced: str | None) -> list[Kind]:
    """Kinds to build, at best `forced`. Raises CpuKindError."""
    own = kinds_of(machine, features)
    if not forced:
        return own
    labels = [kind.label for kind in own]
    if forced not in labels:
        raise CpuKindError(f"{KIND_VARIABLE}={forced}: this CPU ({machine}) has {', '.join(labels)}; name one of them")
    return own[labels.index(forced) :]


# ---- Error codes of kernels, and their exceptions.

NO_MEMORY, RANKS_ENDED, OUT_OF_STEP = 1, 2, 3  # of all kernels; 0 is success


class RanksEnded(Exception):
    """A rank set the group's abort word: waits for other ranks end."""


def failure(code: int) -> Exception:
    if code == RANKS_ENDED:
        return RanksEnded("a rank of this group has ended")
    if code == OUT_OF_STEP:
        return RuntimeError("ranks are out of step: they add partial results of different sizes")
    return MemoryError("a kernel found no memory")


DISABLE_VARIABLE = "TANDEM_NO_C_KERNELS"
CACHE_VARIABLE = "TANDEM_KERNEL_CACHE"
COMPILE_TIMEOUT_S = 300  # linear.c takes 4 s on an idle core
BASE_FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno", "-Wno-psabi", "-Wno-unknown-pragmas")
CPU_INFO = Path("/proc/cpuinfo")

CSRC = Path(__file__).with_name("csrc")

log = logging.getLogger(__name__)

Kernels = TypeVar("Kernels")


class BuildError(Exception):
    """A shared library could not be built."""


class NoCompilerError(BuildError):
    """This machine has no C compiler."""


@dataclass(frozen=True, slots=True)
class CSource:
    """A file of csrc. `functions`: the structure whose address each takes, by name."""

    name: str
    functions: Mapping[str, type[ctypes.Structure]]
    flags: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return CSRC / f"{self.name}.c"

    def load(self, *, kind: Kind | None = None) -> ctypes.CDLL | None:
        """`load_library`, typed."""
        library = load_library(self.path, flags=self.flags, kind=kind)
        return None if library is None else self.typed(library)

    def typed(self, library: ctypes.CDLL) -> ctypes.CDLL:
        for name, structure in self.functions.items():
            getattr(library, f"tandem_{name}").argtypes = [ctypes.POINTER(structure)]
        return library

    def open(self, make: Callable[[ctypes.CDLL], Kernels]) -> Kernels | None:
        library = self.load()
        return None if library is None else make(library)

    def once(self, make: Callable[[ctypes.CDLL], Kernels]) -> Callable[[], Kernels | None]:
        """Return a function that opens it at its first call."""
        return cache(partial(self.open, make))


TEAM = CSource("team", {}, flags=("-pthread",))


def load_library(source: Path, *, flags: tuple[str, ...] = (), kind: Kind | None = None) -> ctypes.CDLL | None:
    """Return the library, or None with one log line. Raises CpuKindError.

    `kind` is the best one allowed, by default the environment's.
    """
    if os.environ.get(DISABLE_VARIABLE) == "1":
        log.info("C kernels are off (%s=1): torch computes instead", DISABLE_VARIABLE)
        return None
    try:
        library = _load(_built(source, own_flags=flags, kind=kind))
        if hasattr(library, "tandem_use_team"):  # includes team.h
            calls = _load(_built(TEAM.path, own_flags=TEAM.flags)).tandem_team_calls
            calls.restype = ctypes.c_void_p
            library.tandem_use_team(ctypes.c_void_p(calls()))
        return library
    except BuildError as e:
        log.warning("no C kernel from %s, torch computes instead (slower): %s", source.name, e)
        return None


@cache
def cpu_features() -> frozenset[str]:
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return frozenset()
    cores = {line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))}
    return frozenset.intersection(*(frozenset(core.split()) for core in cores)) if cores else frozenset()


def cpu_kinds(best: Kind | None = None) -> list[Kind]:
    """Kinds to build for, best first. Raises CpuKindError."""
    forced = os.environ.get(KIND_VARIABLE) if best is None else best.label
    return kinds_to_try(platform.machine(), cpu_features(), forced)


def flag_sets(best: Kind | None = None) -> list[tuple[str, ...]]:
    """Flags to try in order: a compiler may be older than this CPU. Raises CpuKindError."""
    return [flags_of(kind, cpu_features()) for kind in cpu_kinds(best)]


def fields(pointers: Iterable[str], numbers: Iterable[str], floats: Iterable[str] = ()) -> list[tuple[str, type]]:
    """Return `_fields_`: void *, then int64_t, then float members."""
    kinds = ((pointers, ctypes.c_void_p), (numbers, ctypes.c_int64), (floats, ctypes.c_float))
    return [(name, kind) for names, kind in kinds for name in names]


def check_buildable(source: Path) -> None:
    """Raises BuildError, or its subclass NoCompilerError."""
    _load(_built(source))


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as e:
        path.unlink(missing_ok=True)  # not a library: the next start rebuilds it
        raise BuildError(f"cannot load {path}: {e}") from e


def _built(source: Path, *, own_flags: tuple[str, ...] = (), kind: Kind | None = None) -> Path:
    sets = flag_sets(kind)
    compiler = _compiler()
    folder = cache_dir()
    errors: list[str] = []
    for extra in sets:
        flags = BASE_FLAGS + own_flags + extra
        target = folder / f"{source.stem}-{_key(source, compiler, flags)}.so"
        try:
            with _alone(target):
                if not target.exists():
                    _compile(source, target, [*compiler, *flags])
        except BuildError as e:
            errors.append(str(e))
            continue
        if errors:
            log.warning("%s was built without %s and may be slow: %s", source.name, " ".join(sets[0]), errors[0])
        return target
    raise BuildError(errors[-1])


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    if target.exists():
        yield
        return
    lock = target.with_suffix(".lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)  # both waiting and later processes find the target


def _compile(source: Path, target: Path, command: list[str]) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
    os.close(handle)
    try:
        done = subprocess.run(
            [
                *command,
                "-o",
                name,
                str(source),
                "-lm",
                "-Wl,-z,defs",
            ],  # a missing symbol is an error here, not at load
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise BuildError(f"{command[0]} failed: {_first_line(done.stderr)}")
        _flush(name)  # a library torn by a power cut would be a SIGBUS at its first load, not an error
        os.replace(name, target)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise BuildError(f"{command[0]}: {e}") from e
    finally:
        Path(name).unlink(missing_ok=True)


def _flush(name: str) -> None:
    handle = os.open(name, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _first_line(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines()
    return lines[0] if lines else "no output"


def _compiler() -> list[str]:
    """Raises NoCompilerError."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        found = shutil.which(name) if name else None
        if found:
            return [found]
    if find_spec("ziglang") is not None:
        return [sys.executable, "-P", "-m", "ziglang", "cc"]
    raise NoCompilerError("no C compiler found (install gcc, or set CC, or pip install ziglang)")


def _key(source: Path, compiler: list[str], flags: tuple[str, ...]) -> str:
    texts = [path.read_text() for path in (source, *sorted(source.parent.rglob("*.h")))]
    parts = (*texts, *compiler, *flags, platform.machine())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def cache_dir() -> Path:
    """Only we can write it. Raises BuildError."""
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    own, shared = f"{user_cache}/tandem/kernels", f"{tempfile.gettempdir()}/tandem-kernels-{os.getuid()}"
    for name in (os.environ.get(CACHE_VARIABLE), own, shared):
        if name and _usable(Path(name)):
            return Path(name)
    raise BuildError(f"no private writable directory for kernels; set {CACHE_VARIABLE}")


def _usable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError:
        return False
    others_may_write = status.st_mode & 0o022
    return status.st_uid == os.getuid() and not others_may_write and os.access(folder, os.W_OK)
