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


def progress(total: int, *, unit: str, out: TextIO | None = None) -> "tqdm[Any]":
    out = out or sys.stderr
    if out.isatty():
        return tqdm(total=total, unit=unit, file=out)
    return tqdm(total=total, unit=unit, file=Lines(out), mininterval=LINE_S, maxinterval=LINE_S, miniters=0, ncols=100)
