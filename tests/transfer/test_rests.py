"""A control plane on which nothing waits: its threads wake for heartbeats alone, and at once when there is something to do."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.transfer.cores import KEY, connected_decode_core, decode_core, prefill_core
from tests.transfer.rig import until
from transfer_backends.contract import Route
from transfer_backends.control_thread import REST_S, TICK_S, ControlThread
from transfer_backends.sides import Effects, KVPoll

PING_S = 0.5


def test_a_pair_that_rests_turns_for_pings_and_hands_over_as_before(pairs: Any) -> None:
    pair = pairs(heartbeat_interval_s=PING_S)
    pair.works(1)
    until(lambda: pair.prefill.core.rests and pair.decode.core.rests)
    (peer,), (other,) = pair.decode.core.peers, pair.prefill.core.peers
    turns, poll = [0], pair.decode.control.port.poll

    def counted(timeout_s: float) -> Any:
        turns[0] += 1
        return poll(timeout_s)

    pair.decode.control.port.poll = counted
    first = peer.heartbeat.seq + other.heartbeat.seq  # the pings of one side are signs of life to the other
    until(lambda: peer.heartbeat.seq + other.heartbeat.seq >= first + 3)
    assert turns[0] < 0.6 * 2 * PING_S / TICK_S, "it ticks though nothing waits"
    assert peer.live and not peer.heartbeat.silent and not other.heartbeat.silent
    pair.works(2)


def test_a_side_rests_while_time_changes_nothing() -> None:
    decode, prefill = decode_core(), prefill_core()
    assert decode.rests and prefill.rests
    decode.open(*KEY, "b", 0.0)
    prefill.rooms.open(*KEY, 0.0)
    assert not decode.rests and not prefill.rests
    decode.finder.on_route("b", KEY[0], Route("p:1", "p"), 0.0)
    for core, rests in (
        (decode, False),
        (connected_decode_core(), True),
    ):  # the first waits for an answer to its registration
        room = core.rooms[KEY]
        core.rooms.abort(room, "not needed", 0.1)
        core.rooms.close(room)
        assert room.state is KVPoll.Failed and len(core.rooms) == 0 and core.rests is rests


@pytest.mark.parametrize("woken", [True, False])
def test_a_pause_ends_when_something_is_to_be_done(woken: bool) -> None:
    core: Any = SimpleNamespace(
        rests=True, effects=Effects(), rooms=SimpleNamespace(num_moves=0), peers=SimpleNamespace(next_ping_s=7.2)
    )
    wakes: list[bool] = []
    port: Any = SimpleNamespace(wake=lambda: wakes.append(True))
    control = ControlThread(core, port, name="test", clock=lambda: 7.0)
    assert control._wait_s() == pytest.approx(0.2)
    core.peers.next_ping_s = 9.0 + REST_S
    assert control._wait_s() == REST_S
    with control.locked():
        core.rests = not woken
    assert wakes == [True] * woken
    assert control._wait_s() == (TICK_S if woken else REST_S)
