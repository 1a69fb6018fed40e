"""A prefill worker of several DP ranks: decode looks each rank up once, and knows from then on where a room is. Pure."""

from tests.transfer.cores import CONFIG, decode_core
from transfer_backends.contract import LookupFailed, Route
from transfer_backends.decode.lookup import LookUp
from transfer_backends.decode.manager import DecodeCore
from transfer_backends.liveness import Liveness

NUM_RANKS = 3


def route(rank: int, start: str = "") -> Route:
    return Route(f"p{start}:{1 + rank}", f"rank-{rank}{start}", dp_size=NUM_RANKS, dp_rank=rank)


def looked_up(core: DecodeCore) -> list[int]:
    """The rooms of the look-ups that began since the last call."""
    rooms = [item.room for item in core.effects.queue if isinstance(item, LookUp)]
    core.effects.queue.clear()
    return rooms


def peers(core: DecodeCore, rooms: range) -> list[str | None]:
    return [None if (peer := core.rooms[room, 0].peer) is None else peer.incarnation for room in rooms]


def test_each_rank_is_looked_up_once_however_many_rooms_wait() -> None:
    core, rooms = decode_core(), range(1, 31)
    for room in rooms:
        core.open(room, 0, "b", 0.0)
    assert looked_up(core) == [1], "one look-up: nothing is known of the server"
    core.finder.on_route("b", 1, route(1), 0.1)
    second = looked_up(core)
    assert sorted(room % NUM_RANKS for room in second) == [0, 2]
    for room in second:
        core.finder.on_route("b", room, route(room % NUM_RANKS), 0.2)
    assert looked_up(core) == []
    assert peers(core, rooms) == [f"rank-{room % NUM_RANKS}" for room in rooms]
    for room in range(100, 110):
        core.open(room, 0, "b", 0.3)
    assert looked_up(core) == [] and peers(core, range(100, 110)) == [f"rank-{r % NUM_RANKS}" for r in range(100, 110)]


def test_a_new_start_of_the_worker_is_looked_up_again() -> None:
    core = decode_core()
    for room in range(NUM_RANKS):
        core.open(1 + room, 0, "b", 0.0)
        core.finder.on_route("b", 1 + room, route((1 + room) % NUM_RANKS), 0.0)
    looked_up(core)
    core.on_link_closed(1, 0.1)
    core.proofs.on_proof("rank-1", Liveness.DEAD, 0.1)
    core.open(4, 0, "b", 0.2)
    core.open(5, 0, "b", 0.2)
    assert looked_up(core) == [4], "rank 2 is known, rank 1 is gone"
    core.finder.on_route("b", 4, route(1, "again"), 0.3)
    assert peers(core, range(4, 6)) == ["rank-1again", "rank-2"]


def test_a_rank_that_has_not_registered_is_looked_up_again() -> None:
    core = decode_core()
    core.open(1, 0, "b", 0.0)
    core.finder.on_lookup_failed("b", 1, LookupFailed("DP rank 1 of 3 is not registered"), 0.1)
    assert peers(core, range(1, 2)) == [None]
    looked_up(core)
    core.tick(CONFIG.handshake_timeout_s / 2)
    assert looked_up(core) == [1]


def test_a_server_with_other_ranks_than_before_forgets_those() -> None:
    core = decode_core()
    core.open(1, 0, "b", 0.0)
    core.finder.on_route("b", 1, route(1), 0.0)
    core.open(2, 0, "b", 0.1)
    core.finder.on_route("b", 2, Route("q:1", "alone"), 0.1)
    core.open(4, 0, "b", 0.2)
    assert peers(core, range(4, 5)) == ["alone"]
