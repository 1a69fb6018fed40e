"""Managers that find each other through a real bootstrap server: embedded in prefill, and shared by two of them."""

from typing import Any

import pytest

from bootstrap_server.app import BootstrapServer
from bootstrap_server.client import Registrar
from bootstrap_server.registry import BootstrapConfig
from disagg.registration import RouteFinder, registration_of
from tests.transfer.pool import Pool
from tests.transfer.rig import join, succeed, until
from transfer_backends.contract import RecomputeRequest, SourcePages, TargetPages, TransferConfig, Work
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.engines.registry import FakeEngine
from transfer_backends.prefill.manager import PrefillManager
from transfer_backends.sides import KVPoll

SECRET = b"shared by all"
CONFIG = TransferConfig(handshake_timeout_s=5.0, secret=SECRET)


def prefill_worker(server: str) -> tuple[PrefillManager, Registrar]:
    args = Pool(num_pages=16, page_bytes=64, seed=0).args
    manager = PrefillManager(args, FakeEngine(), CONFIG)
    manager.start()
    registrar = Registrar(server, registration_of(manager, args), secret=SECRET)
    registrar.start()
    return manager, registrar


@pytest.mark.parametrize(("shared", "num_prefills"), [(False, 1), (True, 2)])
def test_any_prefill_serves_any_decode(shared: bool, num_prefills: int) -> None:
    server = BootstrapServer(BootstrapConfig(port=0), shared=shared, secret=SECRET)
    server.start()
    address = f"127.0.0.1:{server.port}"
    pool = Pool(num_pages=16, page_bytes=64, seed=None)
    routes = RouteFinder(secret=SECRET, grace_s=5.0)
    decode = DecodeManager(pool.args, FakeEngine(), CONFIG, lookup=routes.find)
    decode.start()
    prefills: list[tuple[PrefillManager, Registrar]] = []
    try:
        prefills.extend(prefill_worker(address) for _ in range(num_prefills))
        for room in range(1, 7):
            receiver = decode.receiver(room, bootstrap=address)  # may look up before the room is registered
            manager, registrar = prefills[room % num_prefills]
            registrar.add_room(room)
            sender: Any = manager.sender(room)
            join(sender, receiver, [room])
            sender.send(SourcePages([1], metadata_row=0))
            succeed(sender, receiver)
        asking = decode.receiver(
            6, bootstrap=address, room_attempt=1
        )  # the server does not know of it; prefill had it as attempt 0
        until(lambda: asking.poll() is KVPoll.WaitingForInput)
        asking.provide(TargetPages([3], 0, work=Work(tokens=[7, 8])))
        owner = prefills[0][0]
        (asked,) = until(owner.take_recompute_requests)
        assert asked == RecomputeRequest(6, 1, Work(tokens=[7, 8]))
        sender = owner.sender(6, room_attempt=1)
        sender.send(SourcePages([1], metadata_row=0))
        succeed(sender, asking)
        assert decode.counters["peers"] == num_prefills
        served = [manager.counters["succeeded"] for manager, _ in prefills]
        assert served == [6 // num_prefills + (manager is owner) for manager, _ in prefills]
    finally:
        decode.close()
        for manager, registrar in prefills:
            registrar.close()
            manager.close()
        server.close()
