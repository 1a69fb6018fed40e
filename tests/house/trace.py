"""The files of the product that one plain streamed chat enters, from the router through prefill and decode and back.

usage: python -m tests.house.trace     prints the list and the counts

Real processes run with all defaults and a tiny model, over the fake transfer engine. Each records the functions that it enters
(tests/house/recorder.py). A file counts if the request enters a function of it that the same process does not enter when idle:
loops of schedulers and transfers go on beside a request. The router looks at workers so seldom that it hardly looks while a
request runs (`SELDOM`), as it would at one that takes long on a busy machine. What is only entered at import and start-up, or
by the first request (which opens connections), is not recorded. A file counts only if each of three requests enters it, and a
test records again before it fails: a longer record adds to what idle processes enter and takes from what each request enters,
never the reverse. Methods that a dataclass generates count for the file of its module; a msgspec struct runs no Python code
and does not count.
"""

import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.cluster import several, tandem, wait_until
from tests.e2e.ranks.leaders import ANEW
from tests.house.recorder import END, VARIABLE
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.packages import PACKAGES, ROOT

HAND_OVER = ("disagg/", "transfer_backends/")
OFF, IDLE, REQUESTS = 0, 1, (2, 3, 4)  # phases; END comes behind
AT_START = "from tests.house.recorder import install\n\ninstall()\n"
SELDOM = ("--health-check-interval-secs", "600", "--load-poll-interval", "600", "--health-silence", "600")
IDLE_S = 6.0  # longer than the period of every poll and heartbeat
AFTER_S = 0.5  # workers and router still free what the answer held when its last byte has arrived
WRITTEN_S = 60.0
MOST_RECORDS = 4

Function = tuple[Any, ...]  # file, name, first line
Phases = Mapping[int, Sequence[Sequence[Any]]]  # what a process has entered, by phase


@dataclass(frozen=True)
class Entered:
    """Files of the product. `beside_idle`: the request enters a function there that an idle cluster does not enter."""

    at_all: list[str]
    beside_idle: list[str]

    @property
    def hand_over(self) -> list[str]:
        return [file for file in self.beside_idle if file.startswith(HAND_OVER)]


def entered_by_a_plain_chat(is_enough: Callable[[Entered], bool]) -> Entered:
    """Start a pair and record it, again while there is not enough."""
    with tempfile.TemporaryDirectory(prefix="pc-") as name:
        folder = Path(name)
        model = make_tiny_checkpoint(folder / "model", "qwen3")
        with recording(folder) as (phase, env), pair(folder, model, env) as router:
            chat(router, "a first request opens connections")
            for _ in range(MOST_RECORDS):
                record(router, phase)
                wait_until(lambda: not recorders(folder), within_s=WRITTEN_S, what=lambda: f"{recorders(folder)}")
                entered = sum_up(read(folder))
                if is_enough(entered):
                    break
        return entered


@contextmanager
def pair(folder: Path, model: str, env: Mapping[str, str]) -> Iterator[str]:
    """Start a prefill and a decode worker and their router. Yields its URL."""
    serve = ("serve", "--port", "0", "--model-path", model, "--max-total-tokens", "4096")
    mode = ("--disaggregation-transfer-backend", "fake", "--disaggregation-mode")
    commands = {
        "prefill": (*serve, *mode, "prefill", "--disaggregation-bootstrap-port", "0"),
        "decode": (*serve, *mode, "decode"),
    }
    with several(folder, commands, env) as workers:
        urls = (word for role, worker in workers.items() for word in (f"--{role}", worker.url))
        flags = ("router", "--port", "0", "--pd-disaggregation", "--route", "pair", *urls, *SELDOM)
        with tandem(folder / "router", *flags, env=env) as router:
            yield router.url


def record(router: str, phase: Callable[[int], Any]) -> None:
    """An idle time, then streamed chats with unlike prompts of equal length."""
    phase(IDLE)
    time.sleep(IDLE_S)  # the time that is recorded
    for number in REQUESTS:
        phase(number)
        chat(router, f"{number}: {time.time():.6f} begins a plain chat")
        time.sleep(AFTER_S)
    phase(OFF)
    chat(router, "nothing records this one")
    phase(END)
    chat(router, "and this one wakes all processes, which then write")


@contextmanager
def recording(folder: Path) -> Iterator[tuple[Callable[[int], Any], dict[str, str]]]:
    """What sets the phase, and the environment of the processes."""
    (folder / "phase").write_bytes(bytes([OFF]))
    (folder / "sitecustomize.py").write_text(AT_START)
    paths = (str(folder), str(ROOT), os.environ.get("PYTHONPATH", ""))
    env = {**ANEW, VARIABLE: str(folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with (folder / "phase").open("r+b", buffering=0) as file:
        yield (lambda number: (file.seek(0), file.write(bytes([number])))), env


def recorders(folder: Path) -> list[str]:
    """Processes that have recorded and not written yet."""
    return [path.stem for path in folder.glob("*.recording")]


def read(folder: Path) -> list[list[Phases]]:
    """Of each process what it has entered, record by record."""
    found = defaultdict[str, list[Phases]](list)
    for path in folder.glob("*[0-9].json"):
        phases = {int(phase): rows for phase, rows in json.loads(path.read_text()).items()}
        found[path.name.partition(".")[0]].append(phases)
    return list(found.values())


def chat(url: str, content: str) -> None:
    body = {"model": "model", "messages": [{"role": "user", "content": content}], "max_tokens": 8, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60.0) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200 and lines[-1] == "data: [DONE]", lines


def sum_up(processes: Sequence[Sequence[Phases]]) -> Entered:
    at_all, beside_idle = set[str](), set[str]()
    for records in processes:
        idle = functions(records, IDLE)
        requests = [functions([record], number) for record in records for number in REQUESTS]
        at_all |= set.intersection(*map(files_of, requests))
        beside_idle |= set.intersection(*(files_of(request - idle) for request in requests))
    return Entered(sorted(at_all), sorted(beside_idle))


def functions(records: Iterable[Phases], phase: int) -> set[Function]:
    return {tuple(function) for record in records for function in record.get(phase, ())}


def files_of(functions: Iterable[Function]) -> set[str]:
    """Files of the product among theirs, relative to its root."""
    paths = (Path(file) for file, *_ in functions)
    inside = (path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT))
    return {str(path) for path in inside if path.parts[0] in PACKAGES}


if __name__ == "__main__":
    entered = entered_by_a_plain_chat(lambda _: True)
    print(*entered.beside_idle, sep="\n")
    print(
        f"{len(entered.beside_idle)} files, {len(entered.hand_over)} of the hand-over; {len(entered.at_all)} with idle work"
    )
