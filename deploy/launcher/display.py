"""Progress of a loading cluster: bars on a terminal, else lines.

A bar shows the last percentage in a process's log.
"""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from service.extras import install

BAR_CELLS = 20
TEXT_CELLS = 60
_PERCENT = re.compile(r"(\d{1,3})(?:\.\d+)?%")
_LOG_HEAD = re.compile(r"^\d{4}-\d\d-\d\d \S+ (?:\S+ ){0,4}?(?:DEBUG|INFO|WARNING|ERROR):? ")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, kw_only=True)
class ProcessProgress:
    """`text`: the last line of its log. `healthy_s`: seconds to healthy."""

    name: str
    text: str
    elapsed_s: float
    healthy_s: float | None = None


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
                what = "starting" if state.healthy_s is None else f"healthy after {state.healthy_s:.1f} s"
                self.message(f"{state.name}: {what}")

    def message(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def finish(self) -> None:
        pass


Display = LiveDisplay | PlainDisplay


def make_display() -> Display:
    return LiveDisplay(sys.stderr) if sys.stderr.isatty() else PlainDisplay(sys.stderr)


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


# ---- Missing features of this machine, their cost and fix. Pure.

COMPILER = f"apt-get install gcc libc6-dev, or: {install('compiler')}"
HUGE_PAGES = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
BY_TORCH = "torch computes instead, several times slower"


def shortfalls(infos: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(line for info in infos for line in _shortfalls_of(info)))


def _shortfalls_of(info: Mapping[str, Any]) -> Iterator[str]:
    without_kernels = {
        "no compiler": f"this machine has no C compiler; {BY_TORCH}. Mend it: {COMPILER}",
        "failed": f"{info.get('c_kernels_error')}; {BY_TORCH}. It may be mended by: {COMPILER}",
        "off": f"TANDEM_NO_C_KERNELS=1 turns them off; {BY_TORCH}. Mend it: unset TANDEM_NO_C_KERNELS",
    }
    if (state := info.get("c_kernels")) in without_kernels:
        yield f"No C kernels: {without_kernels[state]}"
    if info.get("huge_pages") == "never":
        yield (
            "No huge pages: one thread reads weights and KV about 1.7 times as fast where the system grants them."
            f" Mend it: {HUGE_PAGES}"
        )


# ---- Summary of a healthy cluster. Pure.

# The shipped model answers a repeated key with its value, which it recalls only by the KV cache.
RECALL_PROMPT = "k17 v42 k03 v91 k17"
OTHER_PROMPT = "What is the capital of France? Answer in one sentence."


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process with its /get_server_info."""

    name: str
    role: str
    url: str
    pid: int
    info: Mapping[str, Any]


def summary_text(
    members: Sequence[Member], *, front: str, backend: str | None, log_dir: Path, model: str, shipped: bool, auth: bool
) -> str:
    width = max(len(member.name) for member in members)
    lines = [f"  {m.name:<{width}}  {m.url:<28}  pid {m.pid:<8} {_capacity(m)}".rstrip() for m in members]
    how = f"KV crosses by {backend}" if backend else "unified: one worker does it all"
    lacks = [f"  ! {line}" for line in shortfalls([member.info for member in members])]
    return "\n".join(
        [
            "",
            f"Tandem is ready at {front} ({how})",
            "",
            *lines,
            f"  logs: {log_dir}",
            "",
            *([*lacks, ""] if lacks else []),
            *_try_it(front, model, shipped, auth),
            "",
        ]
    )


def _capacity(member: Member) -> str:
    tokens = member.info.get("max_total_num_tokens")
    what = "features of" if member.role == "encode" else "KV"
    sizes = {name: member.info.get(f"{name.lower()}_size", 1) for name in ("TP", "PP", "DP")}
    several = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return ", ".join([*([f"{what} {tokens:,} tokens"] if tokens else []), *several])


def _try_it(front: str, model: str, shipped: bool, auth: bool) -> list[str]:
    prompt = RECALL_PROMPT if shipped else OTHER_PROMPT
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 1 if shipped else 16,
        "temperature": 0,
    }
    key = " -H 'Authorization: Bearer KEY'" if auth else ""
    curl = f"  curl -s {front}/v1/chat/completions{key} -H 'Content-Type: application/json' \\"
    note = "Try it (the answer is v42: it recalls what followed k17):" if shipped else "Try it:"
    return [note, "", curl, f"    -d {shlex.quote(json.dumps(body))}", "", "Ctrl-C ends it."]
