"""Progress of a loading cluster: bars on a terminal, else lines.

A bar shows the last percentage in a process's log, as tqdm writes it.
"""

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TextIO

BAR_CELLS = 20
TEXT_CELLS = 60
_PERCENT = re.compile(r"(\d{1,3})(?:\.\d+)?%")
_LOG_HEAD = re.compile(r"^\d{4}-\d\d-\d\d \S+ (?:\S+ )?(?:DEBUG|INFO|WARNING|ERROR):? ")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, kw_only=True)
class ProcessProgress:
    """A process while it starts: its last log line, and seconds to healthy."""

    name: str
    text: str
    elapsed_s: float
    healthy_s: float | None = None


class Display(Protocol):
    def update(self, states: Sequence[ProcessProgress]) -> None: ...

    def message(self, text: str) -> None: ...

    def finish(self) -> None: ...


def make_display(out: TextIO = sys.stderr) -> Display:
    return LiveDisplay(out) if out.isatty() else PlainDisplay(out)


def render(states: Sequence[ProcessProgress]) -> list[str]:
    width = max((len(state.name) for state in states), default=0)
    return [_line(state, width) for state in states]


class LiveDisplay:
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._num_lines = 0

    def update(self, states: Sequence[ProcessProgress]) -> None:
        columns = shutil.get_terminal_size().columns
        lines = [line[: columns - 1] for line in render(states)]  # wrapped lines cannot be rewritten
        up = f"\x1b[{self._num_lines}A" if self._num_lines else ""
        self._out.write(up + "".join(f"\x1b[2K{line}\n" for line in lines))
        self._out.flush()
        self._num_lines = len(lines)

    def message(self, text: str) -> None:
        self._num_lines = 0  # keep the lines above
        print(text, file=self._out, flush=True)

    def finish(self) -> None:
        self._num_lines = 0


class PlainDisplay:
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._said: set[tuple[str, bool]] = set()

    def update(self, states: Sequence[ProcessProgress]) -> None:
        for state in states:
            event = (state.name, state.healthy_s is not None)
            if event not in self._said:
                self._said.add(event)
                self.message(f"{state.name}: starting" if state.healthy_s is None else _healthy(state))

    def message(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def finish(self) -> None:
        pass


def _healthy(state: ProcessProgress) -> str:
    return f"{state.name}: healthy after {state.healthy_s:.1f} s"


def _line(state: ProcessProgress, width: int) -> str:
    if state.healthy_s is not None:
        return f"{state.name:<{width}}  [{'█' * BAR_CELLS}]  healthy after {state.healthy_s:.1f} s"
    text = _LOG_HEAD.sub("", _ANSI.sub("", state.text))
    return f"{state.name:<{width}}  [{_bar(text, state.elapsed_s)}]  {state.elapsed_s:4.1f} s  {text[:TEXT_CELLS]}"


def _bar(text: str, elapsed_s: float) -> str:
    percents = _PERCENT.findall(text)
    if percents:
        return ("█" * (min(int(percents[-1]), 100) * BAR_CELLS // 100)).ljust(BAR_CELLS, "░")
    at = int(elapsed_s * 4) % BAR_CELLS
    return "░" * at + "█" + "░" * (BAR_CELLS - 1 - at)
