"""A worker's children end with it, whatever they are doing and however it ends."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from disagg.processes.children import Children
from service.process.child_process import SERVER_VARIABLE
from service.process.stop_signals import END, TO_GROUPS
from tests.transfer.rig import until
from tools.family import family, lives


@pytest.fixture(autouse=True)
def no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the test run forks no such children."""
    monkeypatch.delenv(SERVER_VARIABLE, raising=False)


# The child never asks for anything itself: as one that still imports.
PARENT = """
import os, signal
from disagg.processes.children import Children
children = Children()
children.start("child", "http.server", ["0", "--bind", "127.0.0.1"], num_threads=1)
print(children._processes["child"].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_does_not_outlive_a_parent_that_is_killed_at_once() -> None:
    parent = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=False, timeout=60)
    child = int(parent.stdout)
    until(lambda: not any(map(lives, family(child))))


def test_signals_to_the_whole_group_leave_children_to_their_parent() -> None:
    """(One that dies of a signal before END has its number as its status.)"""
    children = Children()
    try:
        child = children.start("child", "http.server", ["0", "--bind", "127.0.0.1"], num_threads=1)
        for number in TO_GROUPS:
            child.send_signal(number)
    finally:
        children.end()
    assert child.poll() == -END


def test_modules_of_the_working_directory_hide_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locale.py").write_text("raise SystemExit(7)")  # which `calendar` imports
    monkeypatch.chdir(tmp_path)
    assert Children().start("child", "calendar", ["2026", "1"], num_threads=1).wait() == 0


@pytest.mark.parametrize(
    ("asked", "shares", "found"), [(None, False, "20000"), ("0", False, "0"), (None, True, "0"), ("9", True, "9")]
)
def test_a_team_waits_awake_for_a_moment_on_cores_of_its_own_unless_the_operator_says_otherwise(
    asked: str | None, shares: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if asked is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", asked)
    children = Children()
    try:
        children.start(
            "child", "http.server", ["0", "--bind", "127.0.0.1"], num_threads=2, shares_cores=shares, gpu="GPU-a"
        )
        told = Path(f"/proc/{children._processes['child'].pid}/environ").read_text().split("\0")
    finally:
        children.end()
    assert f"GOMP_SPINCOUNT={found}" in told and {"OMP_NUM_THREADS=2", "CUDA_VISIBLE_DEVICES=GPU-a"} <= set(told)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_end_of_a_child_is_news(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    children = Children()

    async def watch() -> str | None:
        news = asyncio.Event()
        with children.watched(news.set):
            assert not news.is_set() and children.dead() is None
            children._processes["second"].kill()
            await asyncio.wait_for(news.wait(), 60)
            return children.dead()

    try:
        for name in ("first", "second"):
            children.start(name, "http.server", ["0", "--bind", "127.0.0.1"], num_threads=1)
        with asyncio.Runner(loop_factory=loop) as runner:
            assert runner.run(watch()) == "the second process ended (status -9)"
            assert runner.run(watch_none(children)) is False
    finally:
        children.end()


async def watch_none(children: Children) -> bool:
    """What has ended before is no news."""
    news = asyncio.Event()
    with children.watched(news.set):
        return news.is_set()
