"""A progress bar for runs of many minutes: in place on a terminal, a line every half minute anywhere else."""

import sys
from typing import Any, TextIO

from tqdm import tqdm

LINE_S = 30.0


class Lines:
    """A stream on which each redrawing of a bar is a line of its own."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> None:
        if line := text.strip():
            self._out.write(f"{line}\n")

    def flush(self) -> None:
        self._out.flush()


def progress(total: int | None, *, unit: str, out: TextIO | None = None, what: str | None = None) -> "tqdm[Any]":
    """`total`: None where it is not known. `what`: what stands before the bar."""
    out = out or sys.stderr
    if out.isatty():
        return tqdm(total=total, unit=unit, file=out, desc=what)
    every: dict[str, Any] = {"mininterval": LINE_S, "maxinterval": LINE_S, "miniters": 0, "ncols": 100}
    return tqdm(total=total, unit=unit, file=Lines(out), desc=what, **every)
