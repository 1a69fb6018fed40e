"""What the simulation found, once more by literals: each fails without its fix, whatever a seed may draw by then."""

from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from router.client.credentials import Credentials
from router.config import RouterConfig
from router.pool.breaker import Check
from router.pool.health import HealthMonitor
from router.pool.worker import Role
from router.pool.workers import WorkerTable
from service.security.keys import open_gate
from tests.transfer.cores import CONFIG, decode_core
from tools.simulation.network import Network
from tools.simulation.options import options_of
from tools.simulation.workers.transfer_engine import KV_BASE, Peer, SimEngine, make_caps
from tools.simulation.world import Process, World
from transfer_backends.contract import EngineError, LookupFailed, OpState, Pieces, Region, Route, TargetPages
from transfer_backends.decode.lookup import LookUp
from transfer_backends.liveness import ProcessMark
from transfer_backends.sides import KVPoll
from transfer_backends.wire import Registered


def test_a_room_that_found_its_prefill_worker_by_another_rooms_look_up_stops_looking() -> None:
    """Its own retry was still due: it attached a second time, or its handshake 'timed out' in mid transfer."""
    core = decode_core()
    first, second = (core.open(room, 0, "b", 0.0).key for room in (1, 2))
    core.finder.on_lookup_failed("b", 1, LookupFailed("not yet"), 0.0)  # both will try again
    core.finder.on_route("b", 1, Route("p:1", "p"), 0.001)
    core.on_message(1, Registered("p", "d", (ProcessMark("h", 1, 1),)), 0.002)
    assert core.rooms[first].state is core.rooms[second].state is KVPoll.WaitingForInput
    core.rooms.provide(core.rooms[first], TargetPages([1, 2], 0), 0.003)
    for now_s in (0.1, 1.0, CONFIG.handshake_timeout_s + 1.0):
        core.tick(now_s)
    assert core.rooms[first].state is core.rooms[second].state is KVPoll.WaitingForInput


def test_a_room_that_a_shared_server_does_not_know_keeps_no_other_room_from_its_look_up() -> None:
    """At the first contact all waited for that room: after 3 s they failed with its error."""
    core = decode_core()
    for room in (1, 2):
        core.open(room, 0, "b", 0.0)
    core.effects.queue.clear()
    core.finder.on_lookup_failed("b", 1, LookupFailed("room: not registered", of_room=True), 0.0)
    assert list(core.effects.queue) == [LookUp("b", 2)]


async def test_an_unanswered_look_at_a_worker_does_not_forget_its_bootstrap_port() -> None:
    """`/health` answered, `/server_info` did not: requests then went out with `bootstrap_port: null`."""

    class Session:
        def get(self, url: str, **_: Any) -> Any:
            raise aiohttp.ServerDisconnectedError

    table = WorkerTable()
    worker = table.add("http://p:80", role=Role.PREFILL)
    table.on_check(worker, Check.OK, now_s=0.0)
    worker.bootstrap.host, worker.bootstrap.port = "p", 8998
    session: Any = Session()
    config = RouterConfig(pd_disaggregation=True)
    gate = open_gate(api_key=None, api_key_file=None, admin_api_key=None, admin_api_key_file=None)
    credentials = Credentials(api=gate.api)
    monitor = HealthMonitor(config=config, table=table, session=session, credentials=credentials)
    monitor._check_health = _healthy  # type: ignore[method-assign]
    watch: Any = SimpleNamespace(worker=worker, heartbeats=None, is_fine=False, info_due_s=0.0, load_due_s=0.0)
    await monitor._check(watch)
    assert (worker.bootstrap.host, worker.bootstrap.port) == ("p", 8998)
    assert worker.checks.last is Check.FAILED and "server_info" in worker.checks.error


async def _healthy(worker: object) -> tuple[Check, str]:
    return Check.OK, ""


@pytest.mark.parametrize("pages_before", range(5))
def test_the_engine_of_a_killed_rank_does_not_say_that_its_writes_have_landed(pages_before: int) -> None:
    """It said DONE of a write whose last pages had died with the rank: the target kept them as a prefix."""
    world, landed = World(324355532), set[int]()
    source, target = (Process(world, node=name, life=1, skew_s=0.0) for name in ("source", "target"))
    region = Region(KV_BASE, 8, 16, None)
    memory: dict[str, Any] = {"region": lambda kind: region, "polled_s": 0.0, "ends_s": None}
    memory |= dict.fromkeys(("read_allowed", "write_allowed"), lambda kind, page: True)
    memory["times_free"] = lambda kind, page: 0
    memory["copy_from"] = lambda other, kind, src, dst, part: landed.add(dst)
    mine: Any = SimpleNamespace(process=source, **memory)
    engine = SimEngine(
        world=world,
        network=Network(world, (0.0, 0.0)),
        memory=mine,
        caps=make_caps(world.rng("caps"), 0.5, host_memory=True, must_poll=False),
        behaviour=options_of(324355532, nodes=8).engine,
        directory={},
        on_progress=lambda: None,
    )
    engine.faulty = False
    peer, page = Peer(SimpleNamespace(process=target, **memory)), Pieces.one(KV_BASE, KV_BASE, 16)
    before = engine.post(peer, page)
    world.run_until(10.0)
    landed.clear()
    op = engine.post(peer, Pieces.one(KV_BASE, KV_BASE, 4 * 16))
    world.run_until(20.0, lambda: len(landed) >= pages_before)
    source.kill()
    world.run_until(20.0)
    assert (engine.poll(before), engine.poll(op)) == (OpState.DONE, OpState.FAILED)
    for ask in (engine.probe, engine.fence, lambda peer: engine.post(peer, page)):
        with pytest.raises(EngineError, match=r"^source\.1: its transfer engine is lost$"):
            ask(peer)
    with pytest.raises(EngineError, match=r"is lost$"):
        engine.connect("target", b"")
