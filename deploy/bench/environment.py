"""A measurement's environment: hardware, versions, commit, command.

Standard library alone: CI's first command runs before anything is installed.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

DISTRIBUTIONS = (
    *("tandem-serve", "torch", "nixl-cu12", "nixl-cu13"),
    *("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13", "aiohttp", "triton"),
)
COMMAND_TIMEOUT_S = 10.0
ROOT = Path(__file__).resolve().parents[2]


def describe() -> dict[str, object]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(_without_directories(arg) for arg in sys.argv),
        "commit": commit(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in DISTRIBUTIONS if (version := _version(name))},
    }


def commit(root: Path = ROOT) -> str | None:
    """Ends with "+changes" if modified."""
    git = ("git", "-C", str(root))
    found = _said(*git, "rev-parse", "--short=12", "HEAD")
    return found + ("+changes" if _said(*git, "status", "--porcelain", "--untracked-files=no") else "") or None


def _without_directories(argument: str) -> str:
    """Hide absolute paths."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _said(*argv: str) -> str:
    if shutil.which(argv[0]) is None:
        return ""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
