"""Workers that send heartbeats over an open stream: their silence is noticed also while they are idle, and they are asked nothing else."""

import asyncio
import time
from typing import Any

import pytest

from router.pool.breaker import Health
from router.pool.heartbeats import SilenceTimer
from router.pool.worker import Worker
from router.pool.workers import WorkerTable
from service.http import heartbeats
from service.http.heartbeats import Beat, HeartbeatReader, NoHeartbeats, first_line, live_line
from tests.router.behaviours import hang, later, streams_on
from tests.router.dummies import CHAT, STREAM, Behaviour, Cluster, answer_ok, cluster, until

BEAT_S = 0.05
LOADS: dict[str, Any] = {"loads": [{"num_running_reqs": 0, "num_used_tokens": 3}]}
# The next check is an hour away; a silence is one of eight beats.
BEATING: dict[str, Any] = {
    "beats_s": BEAT_S,
    "health_check_interval_s": 3600.0,
    "health_check_timeout_s": 3600.0,
    "health_silence_s": 8 * BEAT_S,
}
OFTEN: dict[str, Any] = {**BEATING, "health_check_interval_s": 0.02}


async def trusted(c: Cluster) -> None:
    """Wait until the silence of every worker counts."""
    watches = c.router.monitor._watches.values()
    await until(lambda: all(watch.is_fine for watch in watches))


async def test_an_idle_worker_that_freezes_gets_no_request() -> None:
    async with cluster(decode=2, **BEATING) as c:
        await trusted(c)
        frozen, other = c.decodes
        frozen.frozen = True
        await until(lambda: c.state(frozen).silent)
        assert c.state(frozen).health is Health.UP and not c.state(other).silent
        for _ in range(4):  # least_load would have gone to each in turn
            assert (await c.post("/v1/chat/completions", CHAT))[0] == 200
        assert not frozen.seen and len(other.seen) == 4
        frozen.frozen = False
        await until(lambda: not c.state(frozen).silent)


async def test_what_waits_for_a_worker_that_freezes_moves() -> None:
    async with cluster(decode=2, **BEATING) as c:
        await trusted(c)
        frozen = c.decodes[0]
        frozen.behave = hang
        running = await c.begin(CHAT, frozen)
        frozen.frozen = True
        assert (await running)[0] == 200 and frozen.cancelled == 1


@pytest.mark.parametrize(("role", "behave"), [("prefill", hang), ("decode", hang), ("decode", streams_on)])
async def test_what_waits_for_a_worker_without_another_ends_with_an_error_when_it_freezes(
    role: str, behave: Behaviour
) -> None:
    """Nothing else ends it before its own time is over."""
    async with cluster(**BEATING, dead_worker_timeout_s=3600.0) as c:
        await trusted(c)
        frozen = (c.prefills if role == "prefill" else c.decodes)[0]
        c.prefills[0].behave, c.decodes[0].behave, begun = hang, behave, behave is streams_on
        running = await c.begin(STREAM if begun else CHAT, c.prefills[0], c.decodes[0])
        frozen.frozen = True
        await until(running.done)
        status, headers, answer = await running
        if begun:
            said = f"decode worker {frozen.url}: no heartbeat for 0.8 s (--health-silence)".encode()
            assert status == 200 and said in answer and b"[DONE]" not in answer
        else:
            assert status == 503 and headers["Retry-After"] and f"no {role} worker answers".encode() in answer
        assert c.state(frozen).health is Health.UP
        await until(lambda: frozen.cancelled == 1)
        frozen.frozen = False
        c.prefills[0].behave = c.decodes[0].behave = answer_ok
        assert (await c.post("/v1/chat/completions", CHAT))[0] == 200


async def test_a_worker_that_freezes_keeps_what_waits_where_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    told, note = list[bool](), WorkerTable.on_silence

    def on_silence(table: WorkerTable, worker: Worker, silent: bool) -> bool:
        told.append(silent)
        return note(table, worker, silent)

    monkeypatch.setattr(WorkerTable, "on_silence", on_silence)
    async with cluster(**BEATING, disable_moves=True) as c:
        await trusted(c)
        frozen, goes_on = c.decodes[0], asyncio.Event()
        frozen.behave = later(goes_on)
        running = await c.begin(CHAT, frozen)
        frozen.frozen = True
        await until(lambda: sum(told) >= 3)  # silences, each as long as the limit
        assert not running.done() and not frozen.cancelled
        goes_on.set()
        assert (await running)[0] == 200


async def test_a_worker_whose_heartbeats_are_fine_is_asked_nothing_while_it_rests() -> None:
    """Something runs at the other: its load is asked for."""
    async with cluster(**OFTEN, load_poll_interval_s=0.02) as c:
        idle, live = c.decodes[0], c.prefills[0]
        idle.loads, live.loads, live.beat = LOADS, LOADS, live_line(2.0)
        await trusted(c)
        await until(lambda: c.state(idle).report and c.state(live).process.busy_s == 2.0)
        checks, loads, before = (idle.num_checks, live.num_checks), idle.num_loads, live.num_loads
        await until(lambda: live.num_loads >= before + 10)
        assert idle.num_loads <= loads + 1 and (idle.num_checks, live.num_checks) == checks
        idle.beat = live_line(0.0)
        await until(lambda: idle.num_loads >= loads + 5)


async def test_a_worker_that_rests_is_not_even_looked_at_until_something_runs_there() -> None:
    """Every look costs a wake-up, so an idle cluster makes few."""
    async with cluster(**OFTEN, load_poll_interval_s=0.02) as c:
        idle, live = c.decodes[0], c.prefills[0]
        idle.loads, live.loads, live.beat = LOADS, LOADS, live_line(0.0)
        await trusted(c)
        watches = {watch.worker.url: watch for watch in c.router.monitor._watches.values()}
        watch = watches[c.state(idle).url]
        await until(lambda: watch.heartbeats.rests)
        looks, polls = watch.checked_s, live.num_loads
        await until(lambda: live.num_loads >= polls + 10)
        assert watch.checked_s == looks
        idle.beat = live_line(0.0)
        await until(lambda: watch.checked_s > looks and not watch.heartbeats.rests)


async def test_a_worker_that_says_that_something_is_the_matter_is_checked_at_once() -> None:
    async with cluster(decode=2, **BEATING) as c:
        await trusted(c)
        c.decodes[0].draining, c.decodes[0].beat = True, heartbeats.ASK
        await until(lambda: c.state(c.decodes[0]).health is Health.DRAINING)
        c.decodes[0].draining, c.decodes[0].beat = False, heartbeats.IDLE
        await until(lambda: c.state(c.decodes[0]).health is Health.UP)


async def test_a_worker_whose_stream_ends_is_checked_at_once() -> None:
    async with cluster(decode=2, **BEATING) as c:
        await trusted(c)
        await c.decodes[0].stop()
        await until(lambda: c.state(c.decodes[0]).health is Health.DOWN)


async def test_a_stream_that_breaks_is_opened_again_at_once() -> None:
    async with cluster(decode=2, **BEATING) as c:
        await trusted(c)
        worker = c.decodes[0]
        worker.beating.pop().abort()
        await until(lambda: worker.num_streams == 2)
        await trusted(c)
        assert c.state(worker).health is Health.UP


async def test_heartbeats_that_are_lost_on_their_way_cost_nothing() -> None:
    """The worker answers when it is asked: it is never silent, and the stream is opened again."""
    async with cluster(decode=2, **BEATING) as c:
        await trusted(c)
        lossy, silences = c.decodes[0], list[bool]()
        state = c.state(lossy)
        c.router.table.on_change = lambda: silences.append(state.silent)
        lossy.beat = b""
        await until(lambda: lossy.num_streams >= 2)
        assert not state.silent and True not in silences
        lossy.beat = heartbeats.IDLE
        await trusted(c)


@pytest.mark.parametrize("beats_s", [0.0, 16 * BEAT_S], ids=["unknown", "too seldom"])
async def test_a_worker_without_usable_heartbeats_is_asked_as_before(beats_s: float) -> None:
    """Its stream is not asked for again."""
    async with cluster(**{**OFTEN, "beats_s": beats_s}) as c:
        worker = c.decodes[0]
        await until(lambda: worker.num_checks >= 5)
        c.router.monitor.look(c.state(worker))
        before = worker.num_checks
        await until(lambda: worker.num_checks >= before + 5)
        assert worker.num_streams == 1 and c.state(worker).health is Health.UP
        worker.incarnation = "another process"
        worker.beats_s = BEAT_S
        c.router.monitor.look(c.state(worker))
        await until(lambda: worker.num_streams >= 2)


@pytest.mark.parametrize(
    "line", [b"every 0.25", b"<html>", b"every never\n", b"every -1\n", b"\n", b"idle\n", b"x" * 5000]
)
def test_what_is_no_heartbeat_is_not_taken_for_one(line: bytes) -> None:
    reader = HeartbeatReader()
    if line == b"every 0.25":  # to be continued
        assert reader.read(line) == [] and reader.read(b"\nidle") == [] and reader.every_s == 0.25
        assert reader.read(b"\n") == [Beat(fine=True, rests=True)]
    elif b"\n" in line or len(line) > 4096:
        with pytest.raises(NoHeartbeats):
            reader.read(line)
    else:
        assert reader.read(line) == [] and reader.every_s == 0.0


def test_lines_say_what_a_worker_does() -> None:
    reader = HeartbeatReader()
    text = (
        first_line(0.25) + heartbeats.IDLE + live_line(0.1) + live_line(90.04) + heartbeats.ASK + b"later 7\nlive x\n"
    )
    rests, live, ask = Beat(fine=True, rests=True), Beat(fine=True), Beat(fine=False)
    assert reader.read(text) == [rests, live, Beat(fine=True, busy_s=90.0), ask, ask, live]
    assert reader.every_s == 0.25


async def test_a_router_that_was_held_up_counts_no_worker_as_silent() -> None:
    """What came meanwhile is not read when its timers are."""
    loop, told, received_s = asyncio.get_running_loop(), list[bool](), [0.0]
    received_s[0] = loop.time()
    timer = SilenceTimer(limit_s=0.05, received_s=lambda: received_s[0], report=told.append)
    time.sleep(0.2)
    loop.call_later(0.001, lambda: received_s.__setitem__(0, loop.time()))  # behind the timer
    await until(lambda: told)
    timer.close()
    assert told[0] is False
