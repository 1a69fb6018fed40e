"""Bytes that a cut network holds may land after their operations have ended: what both sides wait for. Pure cores."""

from dataclasses import replace

import numpy as np
import pytest

from tests.transfer.cores import (
    CAPS,
    CONFIG,
    KEY,
    PAGES,
    JoinedCores,
    connected_decode_core,
    posts_of,
    prefill_core,
    registration,
)
from transfer_backends.contract import Pieces, TargetPages
from transfer_backends.liveness import Liveness
from transfer_backends.prefill.inbox import Chunk
from transfer_backends.sides import KVPoll, Send
from transfer_backends.wire import Abort, Drained, Pong, TransferInfo, pack_ids


class Outage:
    """All writes of a room fail at `fails_s` and the fence with them; both sides abort the room."""

    def __init__(self, *, fails_s: float = 0.0) -> None:
        self.pair = JoinedCores()
        self.core, self.decode = self.pair.core, self.pair.decode
        self.now_s = fails_s
        posts = self.pair.posts()
        self.core.rooms.abort(self.core.rooms[KEY], "user")
        for post in posts:
            self.core.completions.on_op_final(post, ok=False, error="", now_s=fails_s)
        self.core.completions.on_fenced("d", ok=False, now_s=fails_s)
        self.decode.rooms.abort(self.decode.rooms[KEY], "user", fails_s)

    def wait(self, seconds: float) -> None:
        for _ in range(round(10 * seconds)):  # running time counts what passes between ticks
            self.now_s += 0.1
            self.core.tick(self.now_s)

    def drained_after(self, seconds: float) -> bool:
        self.wait(seconds)
        self.pair.exchange()
        return self.decode.rooms[KEY].drained

    def reach(self) -> None:
        self.core.admission.on_connected("d", self.now_s)


@pytest.mark.parametrize("fails_s", [0.0, 6.0])
def test_bytes_that_wait_for_the_network_are_awaited(fails_s: float) -> None:
    """An outage lasts 10 s, whenever the fence fails: the row is decode's again as long after it as it lasted, not before."""
    outage = Outage(fails_s=fails_s)
    assert not outage.drained_after(10 - fails_s)
    outage.reach()
    assert not outage.drained_after(9.5)
    assert outage.drained_after(1)


def test_a_pair_of_ranks_whose_network_is_whole_hides_no_outage_of_another() -> None:
    whole, cut = Pieces.one(1, 2, 3), replace(Pieces.one(1, 2, 3), src_rank=1)
    peer = JoinedCores().core.peers.get("d")
    assert peer is not None
    peer.path.on_posted(cut, 0.0)
    for second in range(8):
        peer.path.on_posted(whole, float(second))
        peer.path.on_final(whole, ok=True, now_s=second + 0.5)
    peer.path.on_final(cut, ok=False, now_s=8.0)
    assert peer.path.whole_at_s == 0.0


def test_an_abort_of_an_earlier_try_does_not_replace_what_is_owed() -> None:
    """It was sent before decode learned of try 1, and arrives when prefill has closed the room."""
    outage = Outage()
    path = outage.core.peers.get("d").path
    path.landing[KEY] = outage.decode.rooms[KEY].write_try = 1
    outage.wait(1)
    outage.core.rooms.close(outage.core.rooms[KEY], outage.now_s)
    outage.core.on_message("link", Abort("d", "p", *KEY, "user", 0), outage.now_s)
    outage.reach()
    assert outage.drained_after(2)


def test_other_rooms_do_not_wait_for_what_may_land() -> None:
    """As soon as the peer is reached, a room of other pages is written, and one that is aborted is drained."""
    outage = Outage()
    outage.wait(10)
    outage.reach()
    core, (room, aborted) = outage.core, ((8, 0), (9, 0))
    for number, key in enumerate((room, aborted)):
        core.on_message("link", TransferInfo("d", "p", *key, pack_ids(np.array([30 + number])), 2 + number, 0), 10.0)
    core.on_message("link", Abort("d", "p", *aborted, "user", 0), 10.0)
    assert Send("link", Drained("p", "d", *aborted, 0)) in core.effects.queue
    core.rooms.open(*room, 10.0)
    core.rooms.send(core.rooms[room], Chunk(np.array([1], np.int64), 0, 1, None), 10.0)
    for post in posts_of(core, 10.0):
        core.completions.on_op_final(post, ok=True, error="", now_s=10.0)
    assert core.rooms[room].state is KVPoll.Success
    assert not outage.drained_after(9)


def test_the_next_try_waits_for_what_may_land() -> None:
    pair = JoinedCores()
    for post in pair.posts():
        pair.final(post, ok=False)
    pair.core.completions.on_fenced("d", ok=False, now_s=0.0)
    tries = []
    for tenth in range(1, 24):
        pair.core.tick(tenth / 10)
        pair.core.on_message("link", Pong("d", "p", 0), tenth / 10)
        if tenth == 10:
            pair.core.admission.on_connected("d", 1.0)
        tries.append({post.write_try for post in posts_of(pair.core, tenth / 10)})
    assert tries[:18] == [set()] * 18 and {1} in tries


def test_a_worker_that_connects_again_after_an_outage_finds_its_old_path() -> None:
    """Its link closed in the outage. Bytes of that time may still land: the new link does not get `Drained` sooner."""
    outage = Outage()
    outage.core.on_link_closed("link", 0.0)
    outage.wait(10)
    outage.core.on_message("new", registration("d"), outage.now_s)
    outage.core.on_message("new", Abort("d", "p", *KEY, "user", 0), outage.now_s)
    outage.reach()
    outage.wait(9.5)
    drained = Send("new", Drained("p", "d", *KEY, 0))
    assert drained not in outage.core.effects.queue
    outage.wait(1)
    assert drained in outage.core.effects.queue


def test_a_worker_that_stays_away_is_forgotten() -> None:
    """The network has given up its bytes `resend_s` after the path broke."""
    outage = Outage()
    outage.core.on_link_closed("link", 0.0)
    outage.wait(CAPS.resend_s - 1)
    assert len(outage.core.peers) == 1
    outage.wait(2)
    assert len(outage.core.peers) == 0


def test_a_dead_writers_kernel_may_send_again() -> None:
    """Prefill was silent for 10 s when its death is proven: its last bytes may come as long after that."""
    core = connected_decode_core()
    core.rooms.provide(core.rooms[KEY], TargetPages(PAGES, 1), 0.0)
    core.on_link_closed(1, 10.0)
    core.tick(10.0)
    core.proofs.on_proof("p", Liveness.DEAD, 10.0)
    for tenth in range(95):
        core.tick(10.0 + tenth / 10)
    assert not core.rooms[KEY].drained
    for tenth in range(10):
        core.tick(19.5 + tenth / 10)
    assert core.rooms[KEY].drained


def test_a_silent_peer_does_not_hold_the_window() -> None:
    """Writes to the first worker fill the window, and it falls silent: the second one's go on, and nothing goes to the first."""
    core = prefill_core()
    pages = list(range(0, 40, 2))  # each a piece of its own
    for room, name in enumerate(("first", "second"), start=1):
        core.on_message(name, registration(name), 0.0)
        core.admission.on_connected(name, 0.0)
        core.on_message(name, TransferInfo(name, "p", room, 0, pack_ids(np.array(pages)), 1, 0), 0.0)
        core.rooms.open(room, 0, 0.0)
        core.rooms.send(core.rooms[room, 0], Chunk(np.array(pages, np.int64), 0, 1, None), 0.0)
        if name == "first":
            core.on_message(name, TransferInfo(name, "p", 3, 0, pack_ids(np.array(pages)), 2, 0), 0.0)
            assert sum(len(post.pieces) for post in posts_of(core, 0.0)) == CAPS.max_inflight
    assert posts_of(core, 0.0) == []
    now_s = 0.0
    while core.peers.get("first").answers:
        now_s += CONFIG.heartbeat_interval_s
        core.on_message("second", Pong("second", "p", 0), now_s)
        core.tick(now_s)
    core.rooms.open(3, 0, now_s)
    core.rooms.send(core.rooms[3, 0], Chunk(np.array(pages, np.int64), 0, 2, None), now_s)
    assert {post.key for post in posts_of(core, now_s)} == {(2, 0)}
