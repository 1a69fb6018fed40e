"""One failed write does not fail a transfer: all of it is written anew to the same pages, after a fence. Real bytes."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.transfer.pool import Pool
from tests.transfer.rig import until
from transfer_backends.contract import OpState, Pieces, Route, TransferConfig
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.engines.fake import FakeEngine, FakeOp
from transfer_backends.kvpoll import KVPoll
from transfer_backends.prefill.manager import PrefillManager

SRC, DST = [9, 4, 17, 30], [5, 6, 20, 3]
NUM_POSTS = len(SRC) + 1  # of one piece each, and the metadata row


class Copying(FakeEngine):
    """Copies inside this process. Posts whose number is in `bad` write garbage instead, and fail."""

    def __init__(self, bad: set[int], *, delay_s: float = 0.0) -> None:
        super().__init__(delay_s=delay_s)
        self.caps = replace(self.caps, max_post_pieces=1)
        self.bad = bad
        self.events: list[str] = []

    def post(self, peer: Any, pieces: Pieces) -> FakeOp:
        op = super().post(peer, pieces)
        failed = self.num_posts - 1 in self.bad
        self.events.append("bad" if failed else "post")
        for src, dst, length in zip(pieces.src, pieces.dst, pieces.lengths, strict=True):
            if failed:
                ctypes.memset(int(dst), 0xEE, int(length))
            else:
                ctypes.memmove(int(dst), int(src), int(length))
        return FakeOp(op.due_s, OpState.FAILED if failed else OpState.DONE)

    def fence(self, peer: Any) -> FakeOp:
        self.events.append("fence")
        return super().fence(peer)


class Rig:
    def __init__(self, bad: set[int], *, delay_s: float = 0.0, **config: Any) -> None:
        self.engine = Copying(bad, delay_s=delay_s)
        settings = TransferConfig(heartbeat_interval_s=0.1, **config)
        self.pools = [Pool(num_pages=64, page_bytes=64, seed=i) for i in range(2)]
        self.prefill = PrefillManager(self.pools[0].args, self.engine, settings)
        route = Route(self.prefill.control_address, self.prefill.incarnation)
        self.decode = DecodeManager(self.pools[1].args, FakeEngine(), settings, lookup=lambda server, room: route)
        self.prefill.start()
        self.decode.start()

    def begin(self) -> tuple[Any, Any]:
        """In two chunks; both are handed over before anything fails or after, as it comes."""
        sender, receiver = self.prefill.sender(1), self.decode.receiver(1, bootstrap="b")
        until(lambda: receiver.poll() is KVPoll.WaitingForInput)
        receiver.provide(DST, 7)
        until(lambda: sender.poll() is KVPoll.WaitingForInput)
        sender.send(SRC[:2], start=0, last=False)
        sender.send(SRC[2:], start=2, last=True, metadata_row=2)
        return sender, receiver

    def close(self) -> None:
        self.prefill.check()
        self.decode.check()
        self.decode.close()
        self.prefill.close()


@pytest.fixture
def rigs() -> Iterator[Any]:
    made: list[Rig] = []

    def make(bad: set[int], **options: Any) -> Rig:
        made.append(Rig(bad, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
@pytest.mark.parametrize("bad", range(NUM_POSTS))
def test_whichever_write_fails_all_bytes_arrive(rigs: Any, bad: int, delay_s: float) -> None:
    rig = rigs({bad}, delay_s=delay_s)
    sender, receiver = rig.begin()
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
    sender.close()
    receiver.close()


def test_a_second_failed_write_fails_both_sides(rigs: Any) -> None:
    rig = rigs(set(range(100)))
    sender, receiver = rig.begin()
    until(lambda: sender.poll() is KVPoll.Failed and receiver.poll() is KVPoll.Failed)
    assert "failed (2 times)" in sender.failure() and "failed (2 times)" in receiver.failure()
    until(lambda: sender.released() and receiver.drained())
    rig.engine.bad.clear()
    sender.close()
    receiver.close()


def test_without_retries_the_first_one_does(rigs: Any) -> None:
    rig = rigs({0}, transfer_retries=0)
    sender, receiver = rig.begin()
    until(lambda: sender.poll() is KVPoll.Failed and receiver.poll() is KVPoll.Failed)
    assert rig.prefill.counters.get("retried", 0) == 0
    until(lambda: sender.released() and receiver.drained())
    sender.close()
    receiver.close()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_between_the_attempts_ends_it(rigs: Any, side: str) -> None:
    """The failed attempt takes long to end: nothing is written after the abort, and all is released."""
    rig = rigs({0}, delay_s=0.3)
    sender, receiver = rig.begin()
    until(lambda: rig.engine.num_posts)
    (sender if side == "prefill" else receiver).abort("enough")
    until(lambda: sender.poll() is KVPoll.Failed and receiver.poll() is KVPoll.Failed)
    until(lambda: sender.released() and receiver.drained())
    assert rig.engine.num_posts <= NUM_POSTS
    sender.close()
    receiver.close()
