"""What requests and peers can make a worker remember has an end, in number and in time."""

from typing import Any

import numpy as np
import pytest

from tests.transfer.cores import decode_core, prefill_core, registration
from transfer_backends.contract import RecomputeRequest, Route, Work
from transfer_backends.prefill.inbox import MAX_REASON_CHARS, Inbox, Offer
from transfer_backends.sides import KVPoll
from transfer_backends.wire import Refused


def test_one_prefill_worker_more_than_fit_is_refused_and_those_that_are_known_go_on() -> None:
    core = decode_core(max_peers=2)
    for room in range(1, 4):
        core.open(room, 0, f"server-{room}:1", 0.0)
        core.finder.on_route(f"server-{room}:1", room, Route(f"h{room}:1", f"p{room}"), 0.0)
    assert core.rooms[3, 0].state is KVPoll.Failed and "no more fit (max_peers)" in core.rooms[3, 0].reason
    assert [core.rooms[room, 0].state for room in (1, 2)] == [KVPoll.Bootstrapping] * 2
    core.open(4, 0, "server-2:1", 0.0)
    assert core.rooms[4, 0].state is KVPoll.Bootstrapping and len(core.peers) == 2
    assert core.rooms[3, 0].drained
    core.rooms.close(core.rooms[3, 0])


@pytest.mark.parametrize("shared", [False, True])
def test_the_latest_bootstrap_servers_are_remembered(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    monkeypatch.setattr("transfer_backends.decode.lookup.MAX_SERVERS", 3)
    core = decode_core()
    for room in range(1, 9):
        core.open(room, 0, f"server-{room}:1", 0.0)
        core.finder.on_route(f"server-{room}:1", room, Route("h:1", "p", shared), 0.0)
    table = core.finder._shared if shared else core.finder._routes
    assert list(table) == [f"server-{room}:1" for room in (6, 7, 8)]


# ---- prefill: what peers can make it remember


PEER: Any = None  # the inbox only compares it


def make_inbox(**bounds: int) -> Inbox:
    return Inbox(keep_s=5.0, **{"max_offers": 10, "max_tombstones": 10, **bounds})


def offer(num_pages: int = 1) -> Offer:
    return Offer(PEER, np.arange(num_pages, dtype=np.int64), 0)


def test_offers_and_their_page_ids_are_bounded_and_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer_backends.prefill.inbox.MAX_PAGES", 10)
    inbox = make_inbox(max_offers=3)
    assert inbox.keep((1, 0), offer(8), 0.0) and not inbox.keep((2, 0), offer(3), 0.0)
    assert (
        inbox.keep((3, 0), offer(), 1.0) and inbox.keep((4, 0), offer(), 2.0) and not inbox.keep((5, 0), offer(0), 2.0)
    )
    assert [key for key, _ in inbox.expire(6.0)] == [(1, 0), (3, 0)] and len(inbox) == 1
    assert inbox.keep((6, 0), offer(9), 6.0)
    inbox.check()


def test_ended_rooms_and_their_reasons_are_bounded_and_expire() -> None:
    inbox = make_inbox(max_tombstones=100)
    for room in range(1, 151):
        inbox.bury((room, 0), "x" * 5000, by_peer=True, now_s=room / 100)
    kept = [room for room in range(1, 151) if inbox.tombstone((room, 0)) is not None]
    assert kept == list(range(51, 151))
    stone = inbox.tombstone((51, 0))
    assert stone is not None and len(stone.reason) == MAX_REASON_CHARS
    inbox.bury((51, 0), "again", by_peer=False, now_s=2.0)
    inbox.expire(6.5)
    assert inbox.tombstone((150, 0)) is None and inbox.tombstone((51, 0)) is not None
    inbox.expire(7.0)
    assert not inbox._tombstones


def test_what_decode_asks_is_bounded_in_tokens_and_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer_backends.prefill.inbox.MAX_TOKENS", 5)
    inbox = make_inbox()
    asked = [RecomputeRequest(room, 1, Work(tokens=[7, 7, 7])) for room in (1, 2, 3)]
    assert inbox.keep_request(asked[0], offer(), 0.0) and not inbox.keep_request(asked[1], offer(), 0.0)
    assert (
        inbox.take_recompute_requests() == asked[:1]
        and inbox.keep_request(asked[2], offer(), 0.0)
        and inbox.num_recompute_requests == 1
    )


def test_images_that_peers_send_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer_backends.prefill.inbox.MAX_IMAGE_BYTES", 5)
    inbox = make_inbox()
    asked = [RecomputeRequest(room, 1, Work(tokens=[7], images=b"123")) for room in (1, 2, 3)]
    assert inbox.keep_request(asked[0], offer(), 0.0) and not inbox.keep_request(asked[1], offer(), 0.0)
    assert inbox.take_recompute_requests() == asked[:1] and inbox.keep_request(asked[2], offer(), 0.0)


def test_decode_peers_of_prefill_are_bounded_and_a_lost_one_makes_room() -> None:
    core = prefill_core(max_peers=2)
    for name in ("a", "b", "c"):
        core.on_message(name.encode(), registration(name), 0.0)
    said = [message for _, message in core.effects.queue]
    assert len(core.peers) == 2 and isinstance(said[-1], Refused) and "max_peers" in said[-1].reason
    core.on_link_closed(b"a", 0.5)
    core.on_message(b"c", registration("c"), 1.0)
    assert len(core.peers) == 2 and core.peers.get("c") is not None
    core.check()


def test_one_connection_is_one_decode_worker() -> None:
    """Found by fuzzing: a second incarnation that registers on a connection hid the first one, which then was never dropped."""
    core = prefill_core()
    for name in ("one", "two"):
        core.on_message(b"link", registration(name), 0.0)
    (said,) = [message for _, message in core.effects.queue if isinstance(message, Refused)]
    assert said.dst == "two" and [peer.incarnation for peer in core.peers] == ["one"]
    core.check()
    core.on_link_closed(b"link", 0.5)
    assert not len(core.peers)


@pytest.mark.parametrize("error", ["no route", None], ids=["tries fail", "a try does not end"])
def test_a_decode_peer_that_cannot_be_reached_learns_why_in_time(error: str | None) -> None:
    core = prefill_core(handshake_timeout_s=10.0)
    core.on_message(b"a", registration("a"), 0.0)
    for now_s in (1.0, 1.0, 7.5):
        if error is not None:
            core.admission.on_connect_failed("a", error, now_s)
        core.tick(now_s)
    assert len(core.peers) == 1
    core.effects.queue.clear()
    core.tick(9.0)
    assert len(core.peers) == 0 and core.peers.linked() == []
    (refused,) = [message for _, message in core.effects.queue if isinstance(message, Refused)]
    assert refused.reason == f"prefill cannot reach decode's memory: {error or 'its engine has not answered'}"
    core.admission.on_connected("a", 9.5)
    core.check()
