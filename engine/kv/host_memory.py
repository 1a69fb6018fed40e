"""How much more memory this process may use before the system, or its container, runs out. Knows files of Linux only."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
PROC_MEMINFO, PROC_CGROUP = "proc/meminfo", "proc/self/cgroup"
# Where a hierarchy is mounted, and its files: limit, use, and the line of memory.stat that is given up when memory is short.
_V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_V1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(root: Path = ROOT) -> int | None:
    """The least of the machine's available memory and what each control group above this process has left.

    None where the system does not say. `root`: of the file system with /proc and /sys.
    """
    machine = _field(root / PROC_MEMINFO, "MemAvailable:")
    if machine is None:
        return None
    return max(0, min([machine * 1024, *_rooms(root)]))


def _rooms(root: Path) -> Iterator[int]:
    for hierarchy, group in _groups(root / PROC_CGROUP):
        mount, limit_file, use_file, idle_line = hierarchy
        for folder in (group, *group.parents):
            at = root / mount / folder.relative_to("/")
            limit, used = _number(at / limit_file), _number(at / use_file)
            if limit is not None and used is not None:
                yield limit - used + (_field(at / "memory.stat", idle_line) or 0)


def _groups(file: Path) -> Iterator[tuple[tuple[str, str, str, str], PurePosixPath]]:
    """The memory group of this process in each hierarchy: lines are ID:CONTROLLERS:PATH, without controllers in v2."""
    for line in _text(file).splitlines():
        _, controllers, path = line.split(":", 2)
        if path.startswith("/") and ".." not in path and (controllers == "" or "memory" in controllers.split(",")):
            yield (_V2 if controllers == "" else _V1), PurePosixPath(path)


def _number(file: Path) -> int | None:
    """None where there is no such file, or it says "max"."""
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _field(file: Path, name: str) -> int | None:
    """The number behind `name` at the start of a line."""
    for line in _text(file).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
