"""team.c: each item is written once, whatever becomes of the threads; a late thread holds up nothing; a failure ends all."""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine.kernels import build, tape
from engine.kernels.build import fields
from engine.kernels.tape import Tape, Workspace, tape_library

pytestmark = pytest.mark.skipif(tape_library() is None, reason="no compiler")
KERNELS = Path(__file__).with_name("team_kernels.c")
THREADS = [1, 2, 3, 8]


class Count(ctypes.Structure):
    _fields_ = fields(("written",), ("items", "at_once", "repeats"))


class Stuck(ctypes.Structure):
    _fields_ = fields(("words",), ("items",))


class Failing(ctypes.Structure):
    _fields_ = fields(("words",), ("items", "bad", "code"))


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    library = build.load_library(KERNELS, flags=(f"-I{Path(build.__file__).with_name('csrc')}",))
    assert library is not None
    return library


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", THREADS)
@pytest.mark.parametrize("items", [0, 1, 2, 7, 1000, 20_000])
@pytest.mark.parametrize("at_once", [0, 1, 3, 50_000])
@pytest.mark.parametrize("name", ["count_exclusive", "count_repeatable"])
def test_each_item_is_written_once(kernels: ctypes.CDLL, name: str, items: int, at_once: int, count: int) -> None:
    written = torch.zeros(max(1, items), dtype=torch.int64)
    args = Count(written=written.data_ptr(), items=items, at_once=at_once, repeats=20)
    with threads(count):
        assert tape.call_once(getattr(kernels, name), args) == 0
    assert written[:items].tolist() == [20] * items


@pytest.mark.parametrize("count", THREADS)
def test_a_loop_sees_all_that_the_loop_before_it_wrote(kernels: ctypes.CDLL, count: int) -> None:
    found = []
    for now in (1, count):
        word = torch.ones(1, dtype=torch.int64)
        with threads(now):
            assert tape.call_once(kernels.add_in_turns, Count(written=word.data_ptr(), items=9, repeats=3000)) == 0
        found.append(int(word))
    assert found[0] == found[1]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_thread_that_lost_its_core_holds_up_neither_its_loop_nor_the_calls_behind_it(
    kernels: ctypes.CDLL, count: int
) -> None:
    """The held thread is released by a call behind its own: without help this never ends."""
    words = torch.zeros(3, dtype=torch.int64)
    args, recorded = Stuck(words=words.data_ptr(), items=5), Tape(Workspace(1))
    recorded.note(kernels.hold_first, args)
    recorded.note(kernels.release, args)
    with threads(count):
        for plays in (1, 2, 3):
            words.zero_()
            recorded.play()
            begun, released, written = words.tolist()
            assert begun >= 2 and released == 1 and written == 5, (plays, words)


def test_a_late_thread_that_reads_what_later_calls_wrote_takes_part_in_none_of_them(kernels: ctypes.CDLL) -> None:
    words, written = torch.zeros(5, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    args, recorded = Stuck(words=words.data_ptr(), items=5), Tape(Workspace(1))
    for name in ("hold_and_go_on", "overwrite", "release"):
        recorded.note(getattr(kernels, name), args)
    recorded.note(kernels.count_exclusive, Count(written=written.data_ptr(), items=3, at_once=1, repeats=5000))
    with threads(2):
        recorded.play()
    assert written.tolist() == [5000] * 3 and words[4] == 0


@pytest.mark.parametrize("count", THREADS)
def test_a_failure_ends_the_work_of_all_threads_and_the_next_call_is_whole(kernels: ctypes.CDLL, count: int) -> None:
    words, written = torch.zeros(1, dtype=torch.int64), torch.zeros(50, dtype=torch.int64)
    with threads(count):
        for bad in (0, 17, 49):
            assert tape.call_once(kernels.fail_at, Failing(words=words.data_ptr(), items=50, bad=bad, code=7)) == 7
            written.zero_()
            args = Count(written=written.data_ptr(), items=50, at_once=1, repeats=3)
            assert tape.call_once(kernels.count_exclusive, args) == 0 and written.tolist() == [3] * 50


def test_calls_behind_one_that_failed_are_not_made(kernels: ctypes.CDLL) -> None:
    words, written, recorded = torch.zeros(1, dtype=torch.int64), torch.zeros(5, dtype=torch.int64), Tape(Workspace(1))
    recorded.note(kernels.fail_at, Failing(words=words.data_ptr(), items=9, bad=3, code=-1))
    recorded.note(kernels.count_exclusive, Count(written=written.data_ptr(), items=5, at_once=1, repeats=1))
    with threads(3), pytest.raises(MemoryError):
        recorded.play()
    assert written.tolist() == [0] * 5


def test_the_number_of_threads_may_change_between_two_plays_of_a_tape(kernels: ctypes.CDLL) -> None:
    word, recorded = torch.zeros(1, dtype=torch.int64), Tape(Workspace(1))
    recorded.note(kernels.add_in_turns, Count(written=word.data_ptr(), items=40, repeats=50))
    found = []
    for count in (1, 4, 2, 1, 3, 8, 2):
        word.fill_(1)
        with threads(count):
            recorded.play()
        found.append(int(word))
    assert len(set(found)) == 1


def test_threads_of_several_leaders_do_not_meet_and_end_with_their_leader(kernels: ctypes.CDLL) -> None:
    before = len(os.listdir("/proc/self/task"))
    sums: list[int] = []

    def lead() -> None:
        torch.set_num_threads(3)
        written = torch.zeros(100, dtype=torch.int64)
        for _ in range(50):
            args = Count(written=written.data_ptr(), items=100, at_once=1, repeats=2)
            assert tape.call_once(kernels.count_exclusive, args) == 0
        sums.append(int(written.sum()))

    leaders = [threading.Thread(target=lead) for _ in range(3)]
    for leader in leaders:
        leader.start()
    for leader in leaders:
        leader.join()
    assert sums == [100 * 100] * 3
    until(lambda: len(os.listdir("/proc/self/task")) <= before)


def until(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


FORKS = """
import os, torch
from engine.kernels.linear import linear_kernel
kernel = linear_kernel()
if kernel is None:
    raise SystemExit(0)
torch.set_num_threads(3)
weight, x = (torch.randn(n, 256, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (320, 20))
matrix = kernel.pack(weight, None)
expected = matrix.times(x)
child = os.fork()
same = torch.equal(matrix.times(x), expected)
if child == 0:
    os._exit(0 if same else 1)
assert same and os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_has_a_team_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
def test_threads_leave_signals_to_python(kernels: ctypes.CDLL) -> None:
    written = torch.zeros(1, dtype=torch.int64)
    with threads(4):
        tape.call_once(kernels.count_exclusive, Count(written=written.data_ptr(), items=1, at_once=1, repeats=1))
    helpers = [path for path in Path("/proc/self/task").iterdir() if (path / "comm").read_text() == "team\n"]
    assert len(helpers) >= 3
    for path in helpers:
        (blocked,) = [line for line in (path / "status").read_text().splitlines() if line.startswith("SigBlk")]
        assert int(blocked.split()[1], 16) & (1 << 14), "SIGTERM"
