"""GPUs of this machine, and those visible to this process, without importing torch."""

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

LISTING_TIMEOUT_S = 30.0
VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(outer: str | None, installed: Callable[[], Sequence[str]]) -> list[str]:
    """Visible GPUs; CUDA_VISIBLE_DEVICES ends at its first invalid entry."""
    if outer is None:
        return list(installed())
    found: list[str] = []
    for entry in map(str.strip, outer.split(",")):
        if not entry or entry.startswith("-"):
            break
        found.append(entry)
    return found


def installed_gpus() -> list[str]:
    """GPUs by UUID, without nvidia-smi by number."""
    if (tool := shutil.which("nvidia-smi")) is not None:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=LISTING_TIMEOUT_S, check=False)
        if done.returncode == 0:
            return parse_listing(done.stdout)
    nodes = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return [str(i) for i in range(len(nodes))]  # in a container nvidia5 may be the only one: CUDA's number 0


def parse_listing(text: str) -> list[str]:
    """Parse `nvidia-smi -L`; with MIG only the parts are visible."""
    found: list[list[str]] = []
    for kind, uuid in re.findall(r"^\s*(GPU|MIG) .*\(UUID: ([^)]+)\)", text, re.MULTILINE):
        if kind == "GPU":
            found.append([uuid])
        elif found:
            found[-1].append(uuid)
    return [uuid for gpu in found for uuid in (gpu[1:] or gpu)]
