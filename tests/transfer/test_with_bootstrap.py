"""Managers that find each other through a real bootstrap server: embedded in prefill, and shared by two of them."""

from contextlib import ExitStack
from typing import Any

import pytest

from bootstrap_server.app import BootstrapServer
from bootstrap_server.client import Registrar
from bootstrap_server.registry import BootstrapConfig
from disagg.registration import RouteFinder, registration_of
from tests.transfer.pool import Pool
from tests.transfer.rig import Workers, join, succeed, until
from transfer_backends.contract import RecomputeRequest, SourcePages, TargetPages, TransferConfig, Work
from transfer_backends.prefill.manager import PrefillManager
from transfer_backends.sides import KVPoll

SECRET = b"shared by all"
CONFIG = TransferConfig(handshake_timeout_s=5.0, secret=SECRET)
ARGS = Pool(num_pages=16, page_bytes=64, seed=0).args


@pytest.mark.parametrize(("shared", "num_prefills"), [(False, 1), (True, 2)])
def test_any_prefill_serves_any_decode(shared: bool, num_prefills: int) -> None:
    with ExitStack() as ends:
        server, workers = BootstrapServer(BootstrapConfig(port=0), shared=shared, secret=SECRET), Workers(ends, CONFIG)
        server.start()
        ends.callback(server.close)
        address = f"127.0.0.1:{server.port}"
        prefills: list[tuple[PrefillManager, Registrar]] = []
        for _ in range(num_prefills):
            manager = workers.prefill()
            registrar = Registrar(address, registration_of(manager, ARGS), secret=SECRET)
            registrar.start()
            ends.callback(registrar.close)
            prefills.append((manager, registrar))
        decode = workers.decode(RouteFinder(secret=SECRET, grace_s=5.0).find)
        for room in range(1, 7):
            receiver = decode.receiver(room, bootstrap=address)  # may look up before the room is registered
            manager, registrar = prefills[room % num_prefills]
            registrar.add_room(room)
            sender: Any = manager.sender(room)
            join(sender, receiver, [room])
            sender.send(SourcePages([1], metadata_row=0))
            succeed(sender, receiver)
        # the server does not know of it; prefill had it as attempt 0
        asking = decode.receiver(6, bootstrap=address, room_attempt=1)
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
