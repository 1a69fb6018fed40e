"""The ready file of a process or a cluster: what others wait for, and where it serves."""

import json
import os
from pathlib import Path
from typing import Any


def write_ready_file(name: str | None, value: dict[str, Any]) -> None:
    """Write `value` as JSON, atomically: a reader sees the whole file or none. Without a `name` nothing."""
    if name:
        path = Path(name)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(value))
        draft.replace(path)
