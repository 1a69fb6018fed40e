"""`tandem chat --up` as `make chat` runs it: a cluster that lives as long as the chat. Nothing is left of it."""

import asyncio
from pathlib import Path

import psutil
import pytest

from tests.deploy.terminal import Terminal, terminal
from tests.e2e.cluster import SHIPPED
from tests.e2e.leftovers import Leftovers
from tools.family import family

GONE_S = 60.0
FLAGS = ("chat", "--temperature=0", "--max-tokens=4", "--up", *SHIPPED)


@pytest.fixture
def env(temp: Path) -> dict[str, str]:
    return {"TMPDIR": str(temp)}


async def gone(leftovers: Leftovers) -> None:
    await asyncio.to_thread(leftovers.assert_gone, within_s=GONE_S)


async def test_a_chat_brings_its_cluster_and_takes_it_along(temp: Path, env: dict[str, str]) -> None:
    """An answer through two processes, and the end by Ctrl-D."""
    async with terminal(*FLAGS, env=env) as at:
        await at.until("recall at http://127.0.0.1:")
        await at.type("k17 v42 k03 v91 k17\r")
        await at.until("v42")
        await at.until(" → 127.0.0.1:")
        leftovers = Leftovers(at.process.pid, temp)
        assert len(leftovers.family) > 5
        await at.type("\x04")
        assert await at.ended() == 0
        await gone(leftovers)
        assert not list(temp.glob("tandem-chat-*"))


async def test_kill_9_of_a_chat_leaves_nothing(temp: Path, env: dict[str, str]) -> None:
    async with terminal(*FLAGS, "--unified", env=env) as at:
        await at.until("recall at http://127.0.0.1:")
        leftovers = Leftovers(at.process.pid, temp)
        at.process.kill()
        await at.ended()
        await gone(leftovers)


@pytest.mark.slow
async def test_ctrl_c_while_it_starts_ends_it(temp: Path, env: dict[str, str]) -> None:
    async with terminal(*FLAGS, env=env) as at:
        await at.until("prefill-0")
        await until_children(at)
        (up,) = psutil.Process(at.process.pid).children()
        up.suspend()  # however slow this test is, the cluster is not ready before the key
        leftovers = Leftovers(at.process.pid, temp)
        await at.type("\x03")
        up.resume()
        assert await at.ended() == 130
        await gone(leftovers)


async def test_a_cluster_that_does_not_start_says_why(env: dict[str, str]) -> None:
    async with terminal("chat", "--up", "--prefill", "0", env=env) as at:
        assert await at.ended() == 1
        assert "--prefill: must be 1 to 64, got 0" in at.raw and "Traceback" not in at.raw


async def until_children(at: Terminal) -> None:
    """Until workers run."""
    async with asyncio.timeout(GONE_S):
        while len(family(at.process.pid)) < 5:
            await asyncio.sleep(0.01)
