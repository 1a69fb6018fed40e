"""Small operations: those that leave together, and those that the thread which hands pages over posts by itself."""

import threading
from typing import Any

import pytest

from tests.transfer.rig import until
from tests.transfer.test_control_plane import Pair
from tests.transfer.test_tries import KEY, Prefill
from transfer_backends.contract import EngineError, Pieces
from transfer_backends.engines.fake import FakeEngine
from transfer_backends.kvpoll import KVPoll
from transfer_backends.wire import Status


class Posting(FakeEngine):
    """Writes down who posts. `refusals`: of its next posts; `gate`: the sender thread's posts wait for it."""

    def __init__(self, *, refusals: int = 0) -> None:
        super().__init__()
        self.by: list[str] = []
        self.refusals = refusals
        self.gate = threading.Event()
        self.gate.set()
        self.opened = True

    def post(self, peer: Any, pieces: Pieces) -> Any:
        self.by.append(threading.current_thread().name)
        if self.by[-1] == "prefill-sender":
            self.opened &= self.gate.wait(5.0)
        if self.refusals:
            self.refusals -= 1
            raise EngineError("refused")
        return super().post(peer, pieces)


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Any:
    made = Pair(Posting(refusals=getattr(request, "param", 0)))
    yield made
    made.close()


def engine_of(pair: Pair) -> Posting:
    engine = pair.prefill._engine
    assert isinstance(engine, Posting)
    return engine


def test_the_row_leaves_with_the_last_pages_and_decode_hears_of_both_at_once() -> None:
    """At time 5: nothing was told before, and that alone is no reason to tell of progress."""
    pair = Prefill(sends=False)
    pair.core.send(KEY, [1, 8, 2, 9], start=0, last=True, aux_idx=1, now_s=5.0)
    posts = pair.core.next_posts(5.0)
    assert len(posts) == 3 and [post.kv_bytes == 0 for post in posts] == [False, False, True]
    for post in posts:
        pair.core.on_op_final(post, ok=True, error="", now_s=5.0)
    (said,) = [message for _, message in pair.core.effects.outbox]
    assert isinstance(said, Status) and said.state == KVPoll.Success


def test_what_is_too_large_stays_in_its_place() -> None:
    pair = Prefill()
    assert pair.core.next_posts(0.0, max_bytes=1) == []
    assert pair.core.check() == [] and len(pair.core.next_posts(0.0)) == 3


def test_the_last_pages_are_posted_by_who_hands_them_over(pair: Pair) -> None:
    """Unless the sender thread is at work in that moment, which a busy machine may bring about: then in the next room."""
    assert any(_posts_at_once(pair, room) for room in range(7, 27))


def _posts_at_once(pair: Pair, room: int) -> bool:
    """Whether the last pages of a room were posted, and done, when `send` returned."""
    sender, receiver = pair.meet(room)
    by = engine_of(pair).by
    by.clear()
    sender.send([4], start=0, last=False)
    until(lambda: by == ["prefill-sender"])
    until(lambda: not pair.prefill._driver.busy)
    sender.send([5, 6], start=1, last=True, aux_idx=0)
    at_once = set(by[1:]) == {threading.current_thread().name} and sender.poll() is KVPoll.Success
    until(lambda: receiver.poll() is KVPoll.Success)
    sender.close()
    receiver.close()
    return at_once


def test_who_hands_over_does_not_wait_for_a_sender_thread_at_work(pair: Pair) -> None:
    engine = engine_of(pair)
    sender, receiver = pair.meet(7)
    engine.gate.clear()
    try:
        sender.send([4], start=0, last=False)
        until(lambda: engine.by == ["prefill-sender"])
        sender.send([5, 6], start=1, last=True, aux_idx=0)
        assert engine.by == ["prefill-sender"] and sender.poll() is KVPoll.Transferring
    finally:
        engine.gate.set()
    until(lambda: sender.poll() is KVPoll.Success and receiver.poll() is KVPoll.Success)
    assert engine.opened and set(engine.by) == {"prefill-sender"}
    sender.close()
    receiver.close()


@pytest.mark.parametrize("pair", [1], indirect=True)
def test_after_a_refusal_nothing_more_of_its_try_is_posted(pair: Pair) -> None:
    sender, receiver = pair.meet(7)
    sender.send([4, 5, 6], start=0, last=True, aux_idx=0)
    assert len(engine_of(pair).by) == 1
    until(lambda: sender.poll() is KVPoll.Success and receiver.poll() is KVPoll.Success)
    assert len(engine_of(pair).by) == 3 and receiver.retries() == 1
    sender.close()
    receiver.close()
