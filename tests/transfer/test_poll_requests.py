"""Decode drives its engine often only while a prefill worker waits for that, and then it does."""

from tests.transfer.cores import MARK, decode_core, prefill_core, registration
from tests.transfer.rig import ChildWorker, until
from transfer_backends.contract import Route, TargetPages
from transfer_backends.decode.lookup import EAGER_S
from transfer_backends.prefill.paths import POLL_REQUEST_EVERY_S
from transfer_backends.sides import KVPoll
from transfer_backends.wire import PollRequest, Registered

NUM_PAGES, PAGE_BYTES = 1024, 32768


def test_decode_is_eager_after_a_poll_request_and_while_it_connects_but_not_because_a_room_is_open() -> None:
    core = decode_core()
    core.open(7, 0, "b", 0.0)
    assert not core.connections.eager(0.0)
    core.finder.on_route("b", 7, Route("p:1", "p"), 0.0)
    assert core.connections.eager(0.0)  # prefill's probe is to arrive
    core.on_message(1, Registered("p", "d", (MARK,)), 1.0)
    core.rooms.provide(core.rooms[7, 0], TargetPages([5, 6], 1), 1.0)
    assert core.rooms.num_exposed == 1 and not core.connections.eager(1.0)
    core.on_message(1, PollRequest("p", "d"), 2.0)
    assert core.connections.eager(2.0 + 0.9 * EAGER_S) and not core.connections.eager(2.0 + 1.1 * EAGER_S)


def test_a_peer_is_asked_to_poll_while_its_writes_are_pending_and_not_more_often_than_needed() -> None:
    core = prefill_core()
    core.on_message("link", registration("d"), 0.0)
    core.effects.queue.clear()
    for now_s in (1.0, 1.0 + POLL_REQUEST_EVERY_S / 2, 1.0 + POLL_REQUEST_EVERY_S):
        core.paths.on_pending("d", now_s)
    assert list(core.effects.queue) == [("link", PollRequest("p", "d"))] * 2
    core.paths.on_pending("gone", 9.0)  # its operation outlived it
    assert core.effects.counters["nudges"] == 2 and POLL_REQUEST_EVERY_S < EAGER_S / 2


def test_over_tcp_nixl_s_writes_wait_for_decode_which_prefill_asks_to_poll() -> None:
    pool = {"num_pages": NUM_PAGES, "page_bytes": PAGE_BYTES}
    common = {"backend": "nixl", "config": {"handshake_timeout_s": 5.0}, "env": {"UCX_TLS": "tcp"}}
    with (
        ChildWorker(role="prefill", pool={**pool, "seed": 1}, **common) as prefill,
        ChildWorker(role="decode", pool={**pool, "seed": None}, **common) as decode,
    ):
        decode.route("b", *prefill.address())
        prefill.sender(1)
        decode.receiver(1, "b")
        until(lambda: decode.poll(1) is KVPoll.WaitingForInput)
        pages = list(range(NUM_PAGES))
        decode.provide(1, pages, 0)
        until(lambda: prefill.poll(1) is KVPoll.WaitingForInput)
        prefill.send(1, pages, 0, 0)
        until(lambda: decode.poll(1) is KVPoll.Success)
        assert decode.pages(pages) == prefill.pages(pages)
        assert prefill.counters()["nudges"] > 0
        ((address, transport, rate),) = prefill.paths()
        assert (address, transport) == ("127.0.0.1", "tcp") and rate > 0
