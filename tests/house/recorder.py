"""Records which functions a process enters, by phase of a test, from its start on.

tests/house/trace.py has processes of the product import it as they start, through a `sitecustomize` on their PYTHONPATH; the
product does not know it. In $TANDEM_ENTERED_DIR the test keeps one byte, `phase`, which all processes map. 0 records nothing;
a process that records leaves PID.recording. END makes it write at its next call what it has entered since it wrote last, as
JSON by phase ([file, name, first line]), and remove PID.recording. Forked processes and new threads record, too.
"""

import json
import mmap
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

VARIABLE = "TANDEM_ENTERED_DIR"
END = 255


class Recorder:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with (directory / "phase").open("rb") as file:
            self._phase = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
        self._seen: dict[int, dict[CodeType, str]] = {}  # by phase: code, and the file of its module
        self._count = 0
        self._lock = threading.Lock()

    def watch(self, frame: FrameType, event: str, _: Any) -> None:
        """A profile function of Python. It may run in any thread."""
        if event != "call" or not (phase := self._phase[0]):
            return
        if phase == END:
            self._write()
            return
        if not self._seen:
            (self._directory / f"{os.getpid()}.recording").touch()
        self._seen.setdefault(phase, {}).setdefault(frame.f_code, str(frame.f_globals.get("__file__", "")))

    def _write(self) -> None:
        with self._lock:
            if not self._seen:
                return
            seen, self._seen = self._seen, {}
        rows = {phase: [_row(code, file) for code, file in list(found.items())] for phase, found in seen.items()}
        self._count += 1
        (self._directory / f"{os.getpid()}.{self._count}.json").write_text(json.dumps(rows))
        (self._directory / f"{os.getpid()}.recording").unlink()


def _row(code: CodeType, file: str) -> tuple[str, str, int]:
    """A dataclass's generated methods have no file of their own: theirs is that of their module."""
    is_generated = code.co_filename.startswith("<")
    return file if is_generated else code.co_filename, f"{code.co_filename}:{code.co_qualname}", code.co_firstlineno


def install() -> None:
    recorder = Recorder(Path(os.environ[VARIABLE]))
    threading.setprofile(recorder.watch)
    sys.setprofile(recorder.watch)
