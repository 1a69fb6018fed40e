"""Available memory of this process, from machine and cgroups."""

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostMemory:
    root: Path = Path("/")

    def available(self) -> int:
        """The minimum of MemAvailable and the rest of each cgroup limit.

        Sources: proc(5) meminfo, cgroup v2 memory.max, v1 memory.limit_in_bytes. Reclaimable files
        are free.
        """
        machine_bytes = _fields(self.root / "proc/meminfo")["MemAvailable:"] * 1024
        return max(0, min([machine_bytes, *_cgroup_bytes(self.root)]))

    def own(self) -> int:
        """RssAnon."""
        return _fields(self.root / "proc/self/status").get("RssAnon:", 0) * 1024

    def begin_peak(self) -> int:
        """Return resident memory and restart `peak` (proc(5) clear_refs).

        Releases malloc's cache first, which would hide a step's allocation.
        """
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.malloc_trim(0)
        with contextlib.suppress(OSError):
            (self.root / "proc/self/clear_refs").write_text("5")
        return _fields(self.root / "proc/self/status").get("VmRSS:", 0) * 1024

    def peak(self) -> int:
        """Maximum resident memory since `begin_peak`, 0 if unknown."""
        return _fields(self.root / "proc/self/status").get("VmHWM:", 0) * 1024


HERE = HostMemory()


def _cgroup_bytes(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, most, now, cold = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, most = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            now, cold = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        folder = base / path.lstrip("/")
        while folder.is_relative_to(base):  # outer limits hold, too; a container's own group is its base
            limit, used = _number(folder / most), _number(folder / now)
            if limit is not None and used is not None:
                yield limit - used + _fields(folder / "memory.stat").get(cold, 0)
            folder = folder.parent


def _number(file: Path) -> int | None:
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].isdigit() else None  # "max": no limit


def _fields(file: Path) -> dict[str, int]:
    return {words[0]: int(words[1]) for line in _lines(file) if len(words := line.split()) > 1 and words[1].isdecimal()}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
