"""Whatever fails one side of a transfer reaches the other by a message or a broken connection: no timer helps.

Every timeout and the heartbeat are an hour here, but for the one that is itself the failure, and that on one side only.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.transfer.pool import Pool
from tests.transfer.rig import ChildWorker, until
from transfer_backends.contract import Route, TransferConfig
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.engines.fake import FakeEngine
from transfer_backends.kvpoll import KVPoll
from transfer_backends.prefill.manager import PrefillManager

HOUR = 3600.0
NO_CLOCK: dict[str, Any] = {
    "bootstrap_timeout_s": HOUR,
    "waiting_timeout_s": HOUR,
    "transfer_timeout_s": HOUR,
    "handshake_timeout_s": HOUR,
    "heartbeat_interval_s": HOUR,
    "drain_timeout_s": HOUR,
    "transfer_retries": 0,
}
PAGES = [3, 4, 5]


class Pair:
    def __init__(self, engine: FakeEngine, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
        pools = [Pool(num_pages=16, page_bytes=64, seed=i) for i in range(2)]
        self.prefill = PrefillManager(pools[0].args, engine, TransferConfig(**{**NO_CLOCK, **prefill}))
        route = Route(self.prefill.control_address, self.prefill.incarnation)
        config = TransferConfig(**{**NO_CLOCK, **decode})
        self.decode = DecodeManager(pools[1].args, FakeEngine(), config, lookup=lambda server, room: route)
        self.prefill.start()
        self.decode.start()
        self.sender: Any = self.prefill.sender(1)
        self.receiver: Any = self.decode.receiver(1, bootstrap="b")

    def give_pages(self) -> None:
        until(lambda: self.receiver.poll() is KVPoll.WaitingForInput)
        self.receiver.provide(PAGES, 0)

    def send(self, *, last: bool) -> None:
        self.give_pages()
        until(lambda: self.sender.poll() is KVPoll.WaitingForInput)
        self.sender.send(PAGES, start=0, last=last, metadata_row=0 if last else None)

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    with ExitStack() as stack:

        def make(engine: FakeEngine | None = None, *, prefill: Any = None, decode: Any = None) -> Pair:
            pair = Pair(engine or FakeEngine(), prefill or {}, decode or {})
            stack.callback(pair.close)
            return pair

        yield make


def assert_both_end(pair: Pair) -> None:
    until(lambda: pair.sender.poll() is KVPoll.Failed and pair.receiver.poll() is KVPoll.Failed)
    until(lambda: pair.sender.released() and pair.receiver.drained())
    pair.sender.close()
    pair.receiver.close()
    pair.prefill.check()
    pair.decode.check()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("stage", ["bootstrapping", "given", "transferring"])
def test_an_abort(pairs: Any, side: str, stage: str) -> None:
    pair = pairs()
    if stage == "given":
        pair.give_pages()
    elif stage == "transferring":
        pair.send(last=False)
    (pair.sender if side == "prefill" else pair.receiver).abort("user")
    if stage == "bootstrapping" and side == "prefill":
        pair.give_pages()  # decode has sent nothing yet that prefill could answer
    assert_both_end(pair)


def test_a_transfer_error(pairs: Any) -> None:
    pair = pairs(FakeEngine(failure_rate=1.0))
    pair.send(last=True)
    assert_both_end(pair)


def test_a_timeout_of_prefill(pairs: Any) -> None:
    pair = pairs(FakeEngine(delay_s=0.4), prefill={"transfer_timeout_s": 0.1})
    pair.send(last=True)
    assert_both_end(pair)


def test_prefill_waited_too_long_for_the_pages(pairs: Any) -> None:
    pair = pairs(prefill={"bootstrap_timeout_s": 0.1})
    until(lambda: pair.sender.poll() is KVPoll.Failed)
    pair.give_pages()
    assert_both_end(pair)


@pytest.mark.parametrize("timeout", ["waiting_timeout_s", "transfer_timeout_s"])
def test_a_timeout_of_decode(pairs: Any, timeout: str) -> None:
    pair = pairs(decode={timeout: 0.1})
    if timeout == "waiting_timeout_s":
        pair.give_pages()
    else:
        pair.send(last=False)
    assert_both_end(pair)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_orderly_end(pairs: Any, side: str) -> None:
    pair = pairs()
    pair.send(last=False)
    (pair.prefill if side == "prefill" else pair.decode).close()
    assert_both_end(pair)


def child(role: str, **config: Any) -> ChildWorker:
    pool = {"num_pages": 16, "page_bytes": 64, "seed": 9}
    return ChildWorker(role=role, backend="fake", pool=pool, config={**NO_CLOCK, **config})


def test_the_death_of_decode() -> None:
    prefill = PrefillManager(Pool(num_pages=16, page_bytes=64, seed=0).args, FakeEngine(), TransferConfig(**NO_CLOCK))
    prefill.start()
    try:
        with child("decode") as decode:
            decode.route("b", prefill.control_address, prefill.incarnation)
            sender = prefill.sender(1)
            decode.receiver(1, "b")
            until(lambda: decode.poll(1) is KVPoll.WaitingForInput)
            decode.provide(1, PAGES, 0)
            until(lambda: sender.poll() is KVPoll.WaitingForInput)
            sender.send(PAGES, start=0, last=False)
            decode.kill()
            until(lambda: sender.poll() is KVPoll.Failed and sender.released())
            sender.close()
            until(lambda: prefill.counters["peers"] == 0)
    finally:
        prefill.close()


def test_the_death_of_prefill_and_its_next_life_at_the_same_address_within_a_heartbeat() -> None:
    routes: list[Route] = []
    pool = Pool(num_pages=16, page_bytes=64, seed=None)
    decode = DecodeManager(pool.args, FakeEngine(), TransferConfig(**NO_CLOCK), lookup=lambda server, room: routes[-1])
    decode.start()
    try:
        with child("prefill") as old:
            control, name = old.address()
            routes.append(Route(control, name, shared=True))
            old.sender(1)
            first = decode.receiver(1, bootstrap="b")
            until(lambda: first.poll() is KVPoll.WaitingForInput)
            first.provide(PAGES, 0)
            until(lambda: old.poll(1) is KVPoll.WaitingForInput)
            old.send(1, PAGES, 0, False, None)
            until(lambda: first.poll() is KVPoll.Transferring)
            old.kill()
        with child("prefill", control_port=int(control.rpartition(":")[2])) as new:
            until(lambda: first.poll() is KVPoll.Failed and first.drained())
            first.close()
            of_the_dead = decode.receiver(2, bootstrap="b")  # the bootstrap server does not know of it yet
            until(lambda: of_the_dead.poll() is KVPoll.Failed)
            assert "has ended" in (of_the_dead.failure() or "")
            of_the_dead.close()
            routes.append(Route(*new.address(), shared=True))
            new.sender(3)
            second = decode.receiver(3, bootstrap="b")
            until(lambda: second.poll() is KVPoll.WaitingForInput)
            second.provide(PAGES, 1)
            until(lambda: new.poll(3) is KVPoll.WaitingForInput)
            new.send(3, PAGES, 0, True, 0)
            until(lambda: second.poll() is KVPoll.Success)
            second.close()
            assert decode.counters["peers"] == 1
            decode.check()
    finally:
        decode.close()
