"""A plain streamed chat through a router, a prefill and a decode worker enters no more files than house.toml allows."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.house.trace import IDLE, REQUESTS, Entered, Phases, entered_by_a_plain_chat, read, recording, sum_up
from tests.packages import ROOT
from tools.house.ratchet import ALL, FILE, HAND_OVER, plain_chat_in

ROUTER, LOOP, ROLE = (str(ROOT / path) for path in ("router/body.py", "engine/loop/loop.py", "disagg/decode_role.py"))

A_PROGRAM = """
import threading
from dataclasses import dataclass
from pathlib import Path

@dataclass
class Row:
    x: int

def set_phase(number):
    Path("phase").write_bytes(bytes([number]))

def called(): ...
def on_a_thread(): ...

called()
set_phase(2)
called()
Row(1)
thread = threading.Thread(target=on_a_thread)
thread.start()
thread.join()
set_phase(255)
called()
"""


def test_a_plain_chat_enters_no_more_files_than_allowed() -> None:
    limit = plain_chat_in((ROOT / FILE).read_text())
    entered = entered_by_a_plain_chat(lambda entered: not above(entered, limit))
    assert not (found := above(entered, limit)), "\n".join(found)
    assert {"router", "engine", "disagg", "transfer_backends"} <= {
        file.partition("/")[0] for file in entered.beside_idle
    }


def above(entered: Entered, limit: Mapping[str, int]) -> list[str]:
    """Counts beyond their limits, with what was counted."""
    found = {ALL: entered.beside_idle, HAND_OVER: entered.hand_over}
    return [
        f"{len(files)} {key}, at most {limit[key]}:\n  " + "\n  ".join(files)
        for key, files in found.items()
        if len(files) > limit[key]
    ]


def test_a_file_counts_if_each_request_enters_what_its_process_does_not_enter_when_idle() -> None:
    router = {
        IDLE: [[ROUTER, "poll", 1]],
        REQUESTS[0]: [[ROUTER, "poll", 1], [ROUTER, "read", 9], [LOOP, "turn", 1]],
        REQUESTS[1]: [[ROUTER, "read", 9], [LOOP, "turn", 1], [ROLE, "rarely", 1]],
        REQUESTS[2]: [[ROUTER, "read", 9], [LOOP, "turn", 1], ["/usr/lib/json.py", "loads", 1]],
    }
    worker = {IDLE: [[LOOP, "turn", 1]], **{number: [[LOOP, "turn", 1]] for number in REQUESTS}}
    assert sum_up([[router]]).beside_idle == ["engine/loop/loop.py", "router/body.py"]
    entered = sum_up([[{IDLE: [[ROUTER, "poll", 1]], **{n: [[ROUTER, "poll", 1]] for n in REQUESTS}}], [worker]])
    assert (entered.at_all, entered.beside_idle) == (["engine/loop/loop.py", "router/body.py"], [])


def test_a_second_record_only_takes_away() -> None:
    request: Phases = {number: [[ROUTER, "read", 9], [LOOP, "turn", 1], [ROLE, "poll", 1]] for number in REQUESTS}
    again = {IDLE: [[LOOP, "turn", 1]], **{number: [[ROUTER, "read", 9], [LOOP, "turn", 1]] for number in REQUESTS}}
    assert sum_up([[request]]).beside_idle == ["disagg/decode_role.py", "engine/loop/loop.py", "router/body.py"]
    assert sum_up([[request, again]]).beside_idle == ["router/body.py"]


def test_the_recorder_sees_threads_and_generated_methods_and_no_phase_but_its_own(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(A_PROGRAM)
    with recording(tmp_path) as (_, env):
        subprocess.run([sys.executable, program], cwd=tmp_path, env={**os.environ, **env}, check=True)
    ((found,),) = read(tmp_path)
    assert set(found) == {2}
    names = {name.rpartition(".")[2].rpartition(":")[2] for file, name, _ in found[2] if file == str(program)}
    assert names >= {"called", "__init__", "on_a_thread"} and "Row" not in names
