"""The ready file of a process or cluster, with its address."""

import json
import os
from pathlib import Path
from typing import Any


def write_ready_file(name: str | None, value: dict[str, Any]) -> None:
    """Write JSON atomically, if there is a `name`."""
    if name:
        path = Path(name)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(value))
        draft.replace(path)
