"""Metadata rows over the control plane, for an engine without host memory: last, once, and only where they belong. Pure cores."""

import msgspec
import pytest

from tests.transfer.cores import ARGS, KEY, MARK, PAGES, SRC, JoinedCores
from transfer_backends.contract import Route, TargetPages, Work
from transfer_backends.liveness import Liveness
from transfer_backends.prefill.inbox import Post
from transfer_backends.prefill.paths import FencePeer
from transfer_backends.sides import KVPoll, PeerProtocolError
from transfer_backends.wire import MAX_ROW_BYTES, MalformedFrame, Registered, Status, decode, encode

ROW = bytes(range(ARGS.aux.item_bytes))
LANDED = [(1, ROW, KVPoll.Transferring)]
SUCCESS = (KVPoll.Success, KVPoll.Success)


def status(state: KVPoll, *, num_pages: int = len(PAGES), retry: int = 0, row: bytes = ROW, attempt: int = 0) -> Status:
    return Status("p", "d", KEY[0], attempt, state, num_pages, "", retry, row)


def writes_rows(post: Post) -> bool:
    return any(at >= ARGS.aux.base_ptr for at in post.pieces.dst.tolist())


def test_the_row_comes_after_the_last_page_and_before_success() -> None:
    pair = JoinedCores(row=ROW)
    posts = pair.posts()
    assert len(posts) == 2 and not any(map(writes_rows, posts))
    assert len(JoinedCores().posts()) == 3  # an engine with host memory writes it
    for post in posts:
        assert pair.landed == [] and KVPoll.Success not in pair.states
        pair.final(post, ok=True)
    assert (pair.landed, pair.states) == (LANDED, SUCCESS)
    assert pair.core.rooms[KEY].released and pair.decode.rooms[KEY].drained
    pair.core.check()
    pair.decode.check()


@pytest.mark.parametrize("ended", [0, 1, 2], ids=["none has ended", "one has ended", "all have ended"])
def test_a_last_chunk_without_pages(ended: int) -> None:
    """The engine has nothing to do for it: it ends with the writes before it, or at once."""
    pair = JoinedCores(row=ROW, sends=False)
    pair.send(SRC)
    posts = pair.posts()
    for post in posts[:ended]:
        pair.final(post, ok=True)
    pair.send([], start=len(SRC), row=1)
    pair.exchange()
    assert (pair.landed == LANDED) == (ended == len(posts))
    for post in posts[ended:]:
        pair.final(post, ok=True)
    assert pair.posts() == [] and (pair.landed, pair.states) == (LANDED, SUCCESS)


def test_a_prompt_without_any_page_to_write() -> None:
    pair = JoinedCores(row=ROW, pages=[], sends=False)
    pair.send([], row=1)
    pair.exchange()
    assert pair.landed == LANDED and pair.states == SUCCESS


@pytest.mark.parametrize("last_is_empty", [False, True])
def test_the_row_of_a_failed_try_is_never_sent(last_is_empty: bool) -> None:
    pair = JoinedCores(row=ROW, sends=False)
    pair.send(SRC[:2])
    pair.send(SRC[2:], start=2, row=None if last_is_empty else 1)
    posts = pair.posts()
    pair.final(posts[0], ok=False)
    for post in posts[1:]:
        pair.final(post, ok=True)
    if last_is_empty:
        pair.send([], start=len(SRC), row=1)
        pair.exchange()
    assert pair.landed == [] and pair.posts() == []
    assert isinstance(pair.core.paths.commands.popleft(), FencePeer)
    pair.core.completions.on_fenced("d", ok=True, now_s=0.0)
    again = pair.posts()
    assert sum(post.pieces.size_bytes for post in again) == len(SRC) * ARGS.kv.item_bytes
    for post in again:
        assert pair.landed == []
        pair.final(post, ok=True)
    assert pair.landed == LANDED and pair.states == SUCCESS


def test_decode_drops_the_row_of_an_earlier_try_and_of_another_attempt() -> None:
    pair = JoinedCores(row=ROW)
    pair.decode.on_message(1, status(KVPoll.Transferring, num_pages=0, retry=1, row=b""), 0.0)
    pair.decode.on_message(1, status(KVPoll.Success, retry=0), 0.0)
    pair.decode.on_message(1, status(KVPoll.Success, retry=1, attempt=1), 0.0)
    assert pair.landed == [] and pair.decode.effects.counters["late_messages"] == 2
    pair.decode.on_message(1, status(KVPoll.Success, retry=1), 0.0)
    pair.decode.on_message(1, status(KVPoll.Success, retry=1), 0.0)  # once more: the row may be another room's by now
    assert pair.landed == LANDED and pair.decode.effects.counters["late_messages"] == 3


def test_a_row_for_an_aborted_room_is_dropped_and_ends_the_exposure() -> None:
    pair = JoinedCores(row=ROW)
    pair.decode.rooms.abort(pair.decode.rooms[KEY], "the user left", 0.0)
    pair.decode.on_message(1, status(KVPoll.Success), 0.0)
    assert pair.landed == [] and pair.decode.rooms[KEY].drained


def test_a_row_lost_with_its_connection() -> None:
    """The pages are there, the row is not: decode fails the room, and its memory waits for proof that prefill is dead."""
    pair = JoinedCores(row=ROW)
    posts = pair.posts()
    pair.final(posts[0], ok=True)
    pair.core.completions.on_op_final(posts[1], ok=True, error="", now_s=0.0)
    (lost,) = pair.core.effects.queue
    assert lost.message == status(KVPoll.Success)
    pair.core.effects.queue.clear()
    pair.decode.on_link_closed(1, 1.0)
    room = pair.decode.rooms[KEY]
    assert (room.state, room.exposed, pair.landed) == (KVPoll.Failed, True, [])
    pair.decode.proofs.on_proof("p", Liveness.DEAD, 1.0)
    for tenth in range(11, 31):
        pair.decode.tick(tenth / 10)
    assert room.drained and pair.landed == []
    pair.decode.rooms.close(room)
    pair.decode.check()


def test_a_new_attempt_gets_a_row_of_its_own() -> None:
    """Decode asks another prefill worker to compute the room again, after the first one died before the row was out."""
    pair = JoinedCores(row=ROW, sends=False)
    pair.decode.on_link_closed(1, 1.0)
    again = pair.decode.open(KEY[0], 1, "b", 2.0)
    pair.decode.finder.on_route("b", KEY[0], Route("q:1", "q"), 2.0)
    pair.decode.on_message(2, Registered("q", "d", (MARK,)), 2.0)
    pair.decode.rooms.provide(again, TargetPages(PAGES, 3, work=Work(tokens=[1, 2, 3])), 2.0)
    old, new = status(KVPoll.Success), status(KVPoll.Success, attempt=1)
    for message in (old, msgspec.structs.replace(old, src="q"), msgspec.structs.replace(new, src="q")):
        assert again.state is KVPoll.WaitingForInput and pair.landed == []
        pair.decode.on_message(2 if message.src == "q" else 1, message, 3.0)
    assert again.state is KVPoll.Success and [landed[:2] for landed in pair.landed] == [(3, ROW)]


@pytest.mark.parametrize("row", [ROW[1:], ROW + b"x"])
def test_a_row_of_another_size_fails_its_room(row: bytes) -> None:
    pair = JoinedCores(row=ROW)
    pair.decode.on_message(1, status(KVPoll.Success, row=row), 0.0)
    room = pair.decode.rooms[KEY]
    assert pair.landed == [] and room.state is KVPoll.Failed and not room.exposed
    assert room.reason == f"prefill sent a metadata row of {len(row)} bytes, not 64"


@pytest.mark.parametrize("state", [KVPoll.Transferring, KVPoll.Failed])
def test_a_row_before_success_is_a_lie(state: KVPoll) -> None:
    pair = JoinedCores(row=ROW)
    with pytest.raises(PeerProtocolError, match=f"a metadata row with {state.name}"):
        pair.decode.on_message(1, status(state), 0.0)
    assert pair.landed == [] and pair.decode.rooms[KEY].state is KVPoll.WaitingForInput


def test_a_row_is_bounded_on_the_wire() -> None:
    most = encode(status(KVPoll.Success, row=bytes(MAX_ROW_BYTES)))
    assert isinstance(decode(most), Status)
    with pytest.raises(MalformedFrame, match="length <= 65536"):
        decode(encode(status(KVPoll.Success, row=bytes(MAX_ROW_BYTES + 1))))
