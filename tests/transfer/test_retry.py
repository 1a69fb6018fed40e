"""One failed write does not fail a transfer: all of it is written anew to the same pages, after a fence. Real bytes."""

import ctypes
from dataclasses import replace
from typing import Any

import pytest

from tests.transfer.cores import JoinedCores
from tests.transfer.rig import Pair, succeed, until
from tests.transfer.ways import SlowEngine
from transfer_backends.contract import Pieces, SourcePages
from transfer_backends.sides import KVPoll
from transfer_backends.wire import Status

SRC, DST = [9, 4, 17, 30], [5, 6, 20, 3]
NUM_POSTS = len(SRC) + 1  # of one piece each, and the metadata row


class Copying(SlowEngine):
    """Copies inside this process. Posts whose number is in `bad` write garbage instead, and fail."""

    def __init__(self, bad: set[int], *, delay_s: float = 0.0) -> None:
        super().__init__(delay_s)
        self.caps = replace(self.caps, max_post_pieces=1)
        self.bad = bad
        self.events: list[str] = []

    def post(self, peer: Any, pieces: Pieces) -> Any:
        self.fails = failed = self.calls["post"] in self.bad
        self.events.append("bad" if failed else "post")
        for src, dst, length in zip(pieces.src, pieces.dst, pieces.lengths, strict=True):
            if failed:
                ctypes.memset(int(dst), 0xEE, int(length))
            else:
                ctypes.memmove(int(dst), int(src), int(length))
        return super().post(peer, pieces)

    def fence(self, peer: Any) -> Any:
        self.events.append("fence")
        return super().fence(peer)


@pytest.fixture
def begin(pairs: Any) -> Any:
    """(pair, sender, receiver) of a transfer in two chunks, both handed over before anything fails or after, as it comes."""

    def make(bad: set[int], *, delay_s: float = 0.0, **config: Any) -> tuple[Pair, Any, Any]:
        pair = pairs(Copying(bad, delay_s=delay_s), heartbeat_interval_s=0.1, **config)
        sender, receiver = pair.meet(1, DST, 7)
        sender.send(SourcePages(SRC[:2]))
        sender.send(SourcePages(SRC[2:], start=2, metadata_row=2))
        return pair, sender, receiver

    return make


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
@pytest.mark.parametrize("bad", range(NUM_POSTS))
def test_whichever_write_fails_all_bytes_arrive(begin: Any, bad: int, delay_s: float) -> None:
    rig, sender, receiver = begin({bad}, delay_s=delay_s)
    until(lambda: sender.poll() is KVPoll.Success and receiver.poll() is KVPoll.Success)
    source, target = rig.pools
    for src, dst in zip(SRC, DST, strict=True):
        assert bytes(target.kv[dst]) == bytes(source.kv[src])
    assert bytes(target.aux[7]) == bytes(source.aux[2])
    counters = rig.prefill.counters
    assert (counters["retried"], counters["failed_posts"], counters.get("failed", 0)) == (1, 1, 0)
    assert rig.decode.counters["retried"] == receiver.retries() == 1
    events = rig.engine.events
    after = events[events.index("fence") :]
    assert "bad" not in after and after.count("post") == NUM_POSTS and after.count("fence") == 1
    succeed(sender, receiver)


def test_a_second_failed_write_fails_both_sides(begin: Any) -> None:
    rig, sender, receiver = begin(set(range(100)))
    until(lambda: sender.poll() is KVPoll.Failed and receiver.poll() is KVPoll.Failed)
    assert "failed (2 times)" in sender.failure() and "failed (2 times)" in receiver.failure()
    rig.fail(sender, receiver)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_between_the_attempts_ends_it(begin: Any, side: str) -> None:
    """The failed attempt takes long to end: nothing is written after the abort, and all is released."""
    rig, sender, receiver = begin({0}, delay_s=0.3)
    until(lambda: rig.engine.calls["post"])
    (sender if side == "prefill" else receiver).abort("enough")
    rig.fail(sender, receiver)
    assert rig.engine.calls["post"] <= NUM_POSTS


# ---- Small operations leave together, and after one that is refused none of its try.


def test_the_row_leaves_with_the_last_pages_and_decode_hears_of_both_at_once() -> None:
    """At time 5: no progress was reported before, and that alone is no reason to report it."""
    pair = JoinedCores(sends=False)
    pair.send(SRC, row=1, now_s=5.0)
    posts = pair.core.outbox.next_posts(5.0)
    assert len(posts) == 3 and [post.kv_bytes == 0 for post in posts] == [False, False, True]
    for post in posts:
        pair.core.completions.on_op_final(post, ok=True, error="", now_s=5.0)
    (said,) = [message for _, message in pair.core.effects.queue]
    assert isinstance(said, Status) and said.state == KVPoll.Success


def test_after_a_refusal_nothing_more_of_its_try_is_posted(pairs: Any) -> None:
    pair = pairs(SlowEngine(post=1))
    sender, receiver = pair.meet(7)
    sender.send(SourcePages([4, 5, 6], metadata_row=0))
    until(lambda: receiver.poll() is KVPoll.Success)
    assert pair.engine.calls["post"] == 1 + 2 and receiver.retries() == 1
    succeed(sender, receiver)
