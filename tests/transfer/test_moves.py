"""What a decode worker's second half needs of transfers: a route that a request names, a sender that computes nothing, one engine."""

from typing import Any

import numpy as np
import pytest

from tests.transfer.cores import ARGS, CAPS, MARK, decode_core, prefill_core, registration
from tests.transfer.engines.hand_engine import HandEngine
from transfer_backends.contract import PeerWork, Route
from transfer_backends.decode.lookup import Connect, LookUp
from transfer_backends.engines.registry import SharedEngine
from transfer_backends.liveness import Liveness
from transfer_backends.sides import KVPoll
from transfer_backends.wire import Recompute, Registered, Status, pack_ids

NAMED = Route("a:9", "a", shared=True)


def test_a_room_goes_where_its_request_says_and_no_server_is_asked() -> None:
    """Others of the same server go by its answer."""
    core = decode_core()
    moved, plain = core.open(1, 0, "b", 0.0, route=NAMED), core.open(2, 0, "b", 0.0)
    asked = [item for item in core.effects.queue if isinstance(item, LookUp)]
    assert [item.room for item in asked] == [2]
    core.finder.on_route("b", 2, Route("p:1", "p"), 0.1)
    later = core.open(3, 0, "b", 0.2)
    assert [room.peer and room.peer.incarnation for room in (moved, plain, later)] == ["a", "p", "p"]
    (connect,) = [item for item in core.effects.queue if isinstance(item, Connect) and item.control == "a:9"]
    core.on_message(connect.link, Registered("a", "d", (MARK,)), 0.3)
    assert moved.state is KVPoll.WaitingForInput


def test_a_named_worker_that_cannot_be_reached_is_given_up_at_once() -> None:
    """A server's answer may be of a worker that starts again; a request that moves has a client who waits."""
    core = decode_core()
    moved, plain = core.open(1, 0, "b", 0.0, route=NAMED), core.open(2, 0, "b", 0.0)
    core.finder.on_route("b", 2, Route("p:1", "p"), 0.0)
    for link in (1, 2):
        core.on_link_closed(link, 0.1)
    assert moved.state is KVPoll.Failed and "a:9" in str(moved.reason)
    assert plain.state is KVPoll.Bootstrapping
    core.check()


def test_a_named_worker_that_is_dead_is_not_connected() -> None:
    core = decode_core()
    core.open(1, 0, "b", 0.0, route=NAMED)
    core.on_message(1, Registered("a", "d", (MARK,)), 0.0)
    core.on_link_closed(1, 0.1)
    core.proofs.on_proof("a", Liveness.DEAD, 0.1)
    core.effects.queue.clear()
    again = core.open(2, 0, "b", 0.2, route=NAMED)
    assert again.state is KVPoll.Failed and not core.effects.queue


@pytest.mark.parametrize(
    ("takes", "cached", "reason"),
    [
        (PeerWork.NONE, False, "computes no prompts"),
        (PeerWork.PREFIXES, False, "computes no prompts"),
        (PeerWork.NONE, True, "sends no prefixes"),
        (PeerWork.PREFIXES, True, ""),
    ],
)
def test_a_decode_worker_computes_no_prompts_of_others_and_sends_prefixes_if_it_has_the_flag(
    takes: PeerWork, cached: bool, reason: str
) -> None:
    core = prefill_core(takes=takes)
    core.on_message(b"d", registration("d"), 0.0)
    core.admission.on_connected("d", 0.0)
    core.effects.queue.clear()
    work: dict[str, Any] = {"skip_pages": 0, "priority": 0, "share": True, "cached": cached}
    core.on_message(b"d", Recompute("d", "p", 7, 1, b"", 0, tokens=pack_ids(np.array([5])), **work), 0.1)
    assert core.inbox.num_recompute_requests == (not reason)
    failed = [message for _, message in core.effects.queue if isinstance(message, Status)]
    assert [status.state for status in failed] == [KVPoll.Failed] * bool(reason)
    assert all(reason in status.reason for status in failed)
    core.check()


def test_two_halves_of_a_worker_register_once_and_the_last_one_closes() -> None:
    engine = HandEngine()
    shared = SharedEngine(engine, num_users=2)
    regions = CAPS.carried(ARGS)
    shared.register(regions)
    engine.registered.append(None)
    shared.register(regions)
    assert engine.registered == [*regions, None]
    shared.close()
    assert not engine.closed
    shared.close()
    assert engine.closed
