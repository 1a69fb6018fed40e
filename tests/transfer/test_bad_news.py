"""Whatever fails one side of a transfer reaches the other by a message or a broken connection: no timer helps.

Every timeout and the heartbeat are an hour here, but for the one that is itself the failure, and that on one side only.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.transfer.rig import ChildWorker, Workers, meet, until
from tests.transfer.ways import SlowEngine
from transfer_backends.contract import FakeEngine, Route, SourcePages, TargetPages, TransferConfig
from transfer_backends.sides import KVPoll

HOUR = 3600.0
CLOCKS = ("bootstrap_timeout", "waiting_timeout", "transfer_timeout", "handshake_timeout", "heartbeat_interval")
NO_CLOCK: dict[str, Any] = {f"{name}_s": HOUR for name in (*CLOCKS, "drain_timeout")} | {"transfer_retries": 0}
PAGES = [3, 4, 5]


@pytest.fixture
def opened(pairs: Any) -> Any:
    """A pair with room 1 open on both sides."""

    def make(engine: FakeEngine | None = None, *, prefill: Any = None, decode: Any = None) -> Any:
        pair = pairs(engine, sides=(prefill or {}, decode or {}), **NO_CLOCK)
        pair.sender, pair.receiver = pair.open(1)
        return pair

    return make


def give_pages(pair: Any) -> None:
    until(lambda: pair.receiver.poll() is KVPoll.WaitingForInput)
    pair.receiver.provide(TargetPages(PAGES, 0))


def send(pair: Any, *, last: bool = False) -> None:
    give_pages(pair)
    until(lambda: pair.sender.poll() is KVPoll.WaitingForInput)
    pair.sender.send(SourcePages(PAGES, metadata_row=0 if last else None))


def assert_both_end(pair: Any) -> None:
    pair.fail(pair.sender, pair.receiver)


def test_a_timeout_of_prefill(opened: Any) -> None:
    """Failed is reported at once; drained and released only when the operation has ended."""
    pair = opened(SlowEngine(0.8), prefill={"transfer_timeout_s": 0.2})
    send(pair, last=True)
    until(lambda: pair.sender.poll() is pair.receiver.poll() is KVPoll.Failed)
    assert not pair.sender.released() and not pair.receiver.drained()
    assert_both_end(pair)


@pytest.mark.parametrize(
    ("timeout", "step", "why"),
    [("waiting_timeout_s", give_pages, "prefill sent nothing for 0.1 s"), ("transfer_timeout_s", send, "no progress")],
)
def test_a_timeout_of_decode(opened: Any, timeout: str, step: Callable[[Any], None], why: str) -> None:
    pair = opened(decode={timeout: 0.1})
    step(pair)
    until(lambda: pair.sender.poll() is pair.receiver.poll() is KVPoll.Failed)
    assert why in pair.receiver.failure() and "aborted by decode" in pair.sender.failure()
    assert_both_end(pair)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_orderly_end(opened: Any, side: str) -> None:
    pair = opened()
    send(pair)
    (pair.prefill if side == "prefill" else pair.decode).close()
    if side == "prefill":
        until(lambda: pair.receiver.poll() is KVPoll.Failed)
        assert "shutting down" in pair.receiver.failure() or "shut down" in pair.receiver.failure()
    assert_both_end(pair)


def child(role: str, **config: Any) -> ChildWorker:
    pool = {"num_pages": 16, "page_bytes": 64, "seed": 9}
    return ChildWorker(role=role, backend="fake", pool=pool, config={**NO_CLOCK, **config})


@pytest.fixture
def workers() -> Iterator[Workers]:
    with ExitStack() as ends:
        yield Workers(ends, TransferConfig(**NO_CLOCK))


def test_the_death_of_decode(workers: Workers) -> None:
    prefill = workers.prefill()
    with child("decode") as decode:
        decode.route("b", prefill.control_address, prefill.incarnation)
        sender = prefill.sender(1)
        decode.receiver(1, "b")
        until(lambda: decode.poll(1) is KVPoll.WaitingForInput)
        decode.provide(1, PAGES, 0)
        until(lambda: sender.poll() is KVPoll.WaitingForInput)
        sender.send(SourcePages(PAGES))
        decode.kill()
        until(lambda: sender.poll() is KVPoll.Failed and sender.released())
        sender.close()
        until(lambda: prefill.counters["peers"] == 0)


def test_the_death_of_prefill_and_its_next_life_at_the_same_address_within_a_heartbeat(workers: Workers) -> None:
    routes: list[Route] = []
    decode = workers.decode(lambda server, room, _: routes[-1])
    with child("prefill") as old:
        control, name = old.address()
        routes.append(Route(control, name, shared=True))
        old.sender(1)
        first = decode.receiver(1, bootstrap="b")
        meet(old, 1, first, PAGES, 0)
        old.send(1, PAGES, 0, None)
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
        meet(new, 3, second, PAGES, 1)
        new.send(3, PAGES, 0, 0)
        until(lambda: second.poll() is KVPoll.Success)
        second.close()
        assert decode.counters["peers"] == 1
