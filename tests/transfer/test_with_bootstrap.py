"""Managers that find each other through a real bootstrap server: embedded in prefill, and shared by two of them."""

from collections.abc import Sequence
from typing import Any

import pytest

from bootstrap_server.client import BootstrapError, Registrar, look_up
from bootstrap_server.config import BootstrapConfig
from bootstrap_server.protocol import Registration
from bootstrap_server.server import BootstrapServer
from tests.transfer.pool import Pool
from tests.transfer.rig import until
from transfer_backends.contract import LookupFailed, RecomputeRequest, Route, TransferConfig, Work
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.engines.fake import FakeEngine
from transfer_backends.kvpoll import KVPoll
from transfer_backends.prefill.manager import PrefillManager
from transfer_backends.wire import PROTOCOL_VERSION

SECRET = b"shared by all"
CONFIG = TransferConfig(handshake_timeout_s=5.0, secret=SECRET)


def find(bootstrap: str, room: int) -> Route:
    """What a decode worker gives its manager."""
    return find_any(bootstrap, room, None)


def find_any(bootstrap: str, room: int, but: Sequence[str] | None) -> Route:
    try:
        reply = look_up(bootstrap, room, any_but=but, secret=SECRET)
    except BootstrapError as error:
        raise LookupFailed(str(error), permanent=error.permanent) from None
    return Route(reply.worker.control, reply.worker.incarnation, reply.shared)


def prefill_worker(server: str) -> tuple[PrefillManager, Registrar, Pool]:
    pool = Pool(num_pages=16, page_bytes=64, seed=0)
    manager = PrefillManager(pool.args, FakeEngine(), CONFIG)
    manager.start()
    host, _, port = manager.control_address.rpartition(":")
    registration = Registration(
        incarnation=manager.incarnation,
        control_host=host,
        control_port=int(port),
        protocol_version=PROTOCOL_VERSION,
        page_size=16,
        signature="model-a",
        dtype="float32",
    )
    registrar = Registrar(server, registration, secret=SECRET)
    registrar.start()
    return manager, registrar, pool


@pytest.mark.parametrize(("shared", "num_prefills"), [(False, 1), (True, 2)])
def test_any_prefill_serves_any_decode(shared: bool, num_prefills: int) -> None:
    server = BootstrapServer(BootstrapConfig(port=0), shared=shared, secret=SECRET)
    server.start()
    address = f"127.0.0.1:{server.port}"
    pool = Pool(num_pages=16, page_bytes=64, seed=None)
    decode = DecodeManager(pool.args, FakeEngine(), CONFIG, lookup=find, lookup_any=find_any)
    decode.start()
    prefills: list[tuple[PrefillManager, Registrar, Pool]] = []
    try:
        prefills.extend(prefill_worker(address) for _ in range(num_prefills))
        for room in range(1, 7):
            receiver = decode.receiver(room, bootstrap=address)  # may look up before the room is registered
            manager, registrar, _ = prefills[room % num_prefills]
            registrar.add_room(room)
            sender: Any = manager.sender(room)
            until(lambda r=receiver: r.poll() is KVPoll.WaitingForInput)
            receiver.provide([room], 0)
            until(lambda s=sender: s.poll() is KVPoll.WaitingForInput)
            sender.send([1], start=0, last=True, metadata_row=0)
            until(lambda r=receiver: r.poll() is KVPoll.Success)
            receiver.close()
            until(sender.released)
            sender.close()
        asking = decode.receiver(
            6, bootstrap=address, room_attempt=1
        )  # the server does not know of it; prefill had it as attempt 0
        until(lambda: asking.poll() is KVPoll.WaitingForInput)
        asking.recompute([3], 0, Work(tokens=[7, 8]))
        owner = prefills[0][0]
        (asked,) = until(owner.take_recompute_requests)
        assert asked == RecomputeRequest(6, 1, Work(tokens=[7, 8]))
        sender = owner.sender(6, room_attempt=1)
        sender.send([1], start=0, last=True, metadata_row=0)
        until(lambda: asking.poll() is KVPoll.Success)
        asking.close()
        until(sender.released)
        sender.close()
        assert decode.counters["peers"] == num_prefills
        served = [manager.counters["succeeded"] for manager, _, _ in prefills]
        assert served == [6 // num_prefills + (manager is owner) for manager, _, _ in prefills]
    finally:
        decode.close()
        for manager, registrar, _ in prefills:
            registrar.close()
            manager.close()
        server.close()
