"""A worker in a long step is busy, not dead, until its watchdog barks: real processes, a prefill step that lasts until the test
lets it go."""

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.e2e.client import generate, session
from tests.e2e.cluster import READY_S, Started, tandem, wait_until
from tests.e2e.workload import recall_body
from tools.faults.switches import switched

CHECKS = ("--health-check-interval-secs=0.2", "--health-check-timeout-secs=2", "--health-failure-threshold=1")
DOWN_S = 2.2  # by these flags a worker that answers no check is down after so long
HELD_S = 2 * DOWN_S
NUM_SHORT = 12
STALLED_S = 3 * HELD_S  # then a step never ends


@dataclass(frozen=True)
class Pd:
    prefill: Started
    decode: Started
    router: Started
    steps: Path  # while this file exists, prefill's step lasts

    def seen(self, worker: Started) -> dict[str, Any]:
        """What the router knows of a worker."""
        (found,) = [w for w in httpx.get(f"{self.router.url}/workers").json()["workers"] if w["url"] == worker.url]
        return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def pd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pd]:
    folder = tmp_path_factory.mktemp("busy")
    serve = ("serve", "--port", "0", "--max-total-tokens", "16384", "--decode-log-interval", "4")
    prefill = ("--disaggregation-mode=prefill", "--disaggregation-bootstrap-port=0", f"--watchdog-timeout={STALLED_S}")
    with contextlib.ExitStack() as stack:
        p = stack.enter_context(tandem(folder / "prefill", *serve, *prefill, env=switched(folder)))
        d = stack.enter_context(tandem(folder / "decode", *serve, "--disaggregation-mode=decode"))
        asked = ("router", "--port", "0", "--pd-disaggregation", "--prefill", p.url, "--decode", d.url, *CHECKS)
        r = stack.enter_context(tandem(folder / "router", *asked))
        stack.callback((folder / "steps").unlink, missing_ok=True)
        yield Pd(p, d, r, folder / "steps")


async def test_a_worker_in_a_long_step_stays_in_the_choice_and_keeps_its_requests(pd: Pd) -> None:
    pd.steps.touch()
    try:
        await _a_long_step(pd)
    finally:
        pd.steps.unlink(missing_ok=True)


async def _a_long_step(pd: Pd) -> None:
    draw = random.Random(5)
    asked = [recall_body(draw, 20, max_new_tokens=8) for _ in range(1 + NUM_SHORT)]
    async with session() as http:
        running = [asyncio.create_task(generate(http, pd.router.url, body)) for body, _ in asked[:2]]
        until_s = time.monotonic() + HELD_S
        while time.monotonic() < until_s:
            seen = await asyncio.to_thread(pd.seen, pd.prefill)
            assert seen["health"] == "up" and not seen["silent"], "a silent one would lose its requests to others"
            assert not any(task.done() for task in running)
            await asyncio.sleep(0.2)
        running += [asyncio.create_task(generate(http, pd.router.url, body)) for body, _ in asked[2:]]
        async with http.get(f"{pd.prefill.url}/health") as response:
            said = await response.json()
            assert response.status == 200 and said["busy_s"] >= DOWN_S
            step, num_tokens = said["step"], len(asked[0][0]["input_ids"])
            assert step["kind"] == "prefill" and step["num_tokens"] == step["num_reqs"] * num_tokens
        pd.steps.unlink()
        answers = await asyncio.gather(*running)
    assert [answer["output_ids"] for answer in answers] == [wanted for _, wanted in asked]


def test_a_frozen_scheduler_is_silent_then_down_and_comes_back(pd: Pd) -> None:
    scheduler = pd.prefill.child("scheduler")
    scheduler.suspend()
    try:
        wait_until(lambda: pd.seen(pd.prefill)["health"] == "down", within_s=READY_S, what="the frozen worker is down")
    finally:
        scheduler.resume()
    wait_until(lambda: pd.seen(pd.prefill)["health"] == "up", within_s=READY_S, what="the worker is back")


def test_workers_have_logged_their_intervals(pd: Pd) -> None:
    """(Of the requests before.)"""
    assert re.search(r"prefill: \d+ steps, \d+ new requests, \d+ new tokens, \d+ cached \(", pd.prefill.log.read_text())
    assert re.search(r"decode: 4 steps, .* usage", pd.decode.log.read_text())


def test_a_worker_whose_step_never_ends_ends_itself(pd: Pd) -> None:
    pd.steps.touch()
    asked, _ = recall_body(random.Random(6), 20)
    assert httpx.post(f"{pd.router.url}/generate", json=asked, timeout=READY_S).status_code in (502, 503)
    wait_until(lambda: pd.prefill.process.poll() is not None, within_s=READY_S, what="the worker's end")
    log = pd.prefill.log.read_text()
    assert "--watchdog-timeout" in log and "in held" in log and "in _run" in log
