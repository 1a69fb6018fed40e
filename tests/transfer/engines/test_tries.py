"""Which try of a room's writing counts: nothing of an earlier one completes it or ends the exposure of its pages. Pure cores."""

import pytest

from tests.transfer.cores import KEY, PAGES, JoinedCores, connected_decode_core
from transfer_backends.contract import TargetPages
from transfer_backends.decode.manager import DecodeCore
from transfer_backends.prefill.paths import FencePeer
from transfer_backends.sides import KVPoll, PeerProtocolError
from transfer_backends.wire import Abort, Drained, Status


def provided() -> DecodeCore:
    """Connected, and the room's pages given to prefill."""
    core = connected_decode_core()
    core.rooms.provide(core.rooms[KEY], TargetPages(PAGES, 1), 0.0)
    core.effects.queue.clear()
    return core


def report(core: DecodeCore, state: KVPoll, num_pages: int, retry: int) -> None:
    core.on_message(1, Status("p", "d", *KEY, int(state), num_pages, "", retry), 1.0)


def test_decode_drops_what_is_said_of_an_earlier_try() -> None:
    core = provided()
    report(core, KVPoll.Transferring, 3, 0)
    report(core, KVPoll.Transferring, 0, 1)
    assert (core.rooms.get(KEY).write_try, core.effects.counters["retried"]) == (1, 1)
    for state in (KVPoll.Success, KVPoll.Failed):
        report(core, state, len(PAGES), 0)
        assert core.rooms[KEY].state is KVPoll.Transferring and core.rooms.num_exposed == 1
    assert core.effects.counters["late_messages"] == 2
    report(core, KVPoll.Success, len(PAGES), 1)
    assert core.rooms[KEY].state is KVPoll.Success and core.rooms[KEY].drained
    core.rooms.close(core.rooms[KEY])


def test_an_acknowledgement_of_an_earlier_try_frees_nothing() -> None:
    core = provided()
    report(core, KVPoll.Transferring, 0, 1)
    core.rooms.abort(core.rooms[KEY], "user", 1.0)
    (abort,) = [item[1] for item in core.effects.queue if isinstance(item, tuple)]
    assert isinstance(abort, Abort) and abort.retry == 1
    core.on_message(1, Drained("p", "d", *KEY, 0), 1.0)
    report(core, KVPoll.Success, len(PAGES), 0)
    assert not core.rooms[KEY].drained and core.rooms.num_exposed == 1
    core.on_message(1, Drained("p", "d", *KEY, 1), 1.0)
    assert core.rooms[KEY].drained
    core.rooms.close(core.rooms[KEY])
    core.check()


def test_a_try_before_there_are_pages_is_a_lie() -> None:
    core = connected_decode_core()
    with pytest.raises(PeerProtocolError, match="before it had pages"):
        report(core, KVPoll.Transferring, 0, 1)
    assert core.rooms.get(KEY).write_try == 0


def test_a_late_completion_counts_for_nothing() -> None:
    """The first of three writes fails; the others of that try end well, before and after decode learned of the next."""
    pair = JoinedCores()
    first = pair.posts()
    assert len(first) == 3 and {post.write_try for post in first} == {0}
    pair.final(first[0], ok=False)
    assert pair.decode.rooms.get(KEY).write_try == 1 and pair.posts() == []
    pair.final(first[1], ok=True)
    pair.final(first[2], ok=True)
    assert pair.core.effects.counters["late_completions"] == 2
    assert pair.states == (KVPoll.Transferring, KVPoll.Transferring) and pair.decode.rooms.num_exposed == 1
    assert pair.posts() == []  # not before the fence
    assert isinstance(pair.core.paths.commands.popleft(), FencePeer)
    pair.core.completions.on_fenced("d", ok=True, now_s=0.0)
    second = pair.posts()
    assert len(second) == 3 and {post.write_try for post in second} == {1}
    for post in second:
        assert pair.states == (KVPoll.Transferring, KVPoll.Transferring)
        pair.final(post, ok=True)
    assert pair.states == (KVPoll.Success, KVPoll.Success) and pair.decode.rooms.num_exposed == 0


def test_an_abort_after_prefill_forgot_the_room_is_acknowledged_with_its_try() -> None:
    pair = JoinedCores()
    posts = pair.posts()
    pair.final(posts[0], ok=False)
    pair.final(posts[1], ok=True)
    pair.core.rooms.abort(pair.core.rooms[KEY], "user")
    pair.core.completions.on_op_final(posts[2], ok=True, error="", now_s=0.0)
    pair.core.completions.on_fenced("d", ok=True, now_s=0.0)
    pair.core.rooms.close(pair.core.rooms[KEY], 0.0)
    pair.core.effects.queue.clear()  # decode does not receive it
    pair.decode.rooms.abort(pair.decode.rooms[KEY], "user", 0.0)
    pair.exchange()
    assert pair.decode.rooms[KEY].drained


def test_a_lost_peer_whose_path_is_whole_and_settled_in_one_tick_goes_once() -> None:
    pair = JoinedCores()
    pair.core.tick(0.0)
    for post in pair.posts():
        pair.core.completions.on_op_final(post, ok=False, error="", now_s=0.0)
    pair.core.completions.on_fenced("d", ok=False, now_s=0.0)
    pair.core.admission.on_connected("d", 0.0)
    pair.core.on_link_closed("link", 0.0)
    for tenth in range(1, 7):
        pair.core.tick(tenth / 10)
    assert len(pair.core.peers) == 0
    pair.core.check()
