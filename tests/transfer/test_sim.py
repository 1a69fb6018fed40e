"""Both cores together in virtual time, with faults; a seed that fails is a script that reproduces it."""

import pytest

from tests.transfer.sim import NUM_PAGES, World


@pytest.mark.parametrize("seed", range(6))
def test_safe_under_faults_and_live_after(seed: int) -> None:
    world = World(seed)
    for _ in range(5000):
        world.step()
    world.heal()
    healed_at_s = world.now_s
    while not world.settled():
        world.step()
        assert world.now_s - healed_at_s < 60, "not everything ended within a minute after the faults"
    assert all(len(decode.free) == NUM_PAGES - 1 for decode in world.decodes)
    assert all(decode.core.rooms.num_exposed == 0 for decode in world.decodes)
    assert world.succeeded > 20 and world.recomputed > 10


def test_without_aborts_of_links_everything_succeeds() -> None:
    world = World(1)
    world.faults = False
    for _ in range(40):
        key = (world.next_room, 0)
        world.next_room += 1
        prefill, decode = world.prefills[key[0] % 2], world.decodes[key[0] % 2]
        prefill.core.rooms.open(*key, world.now_s)
        prefill.senders[key] = 0
        decode.core.open(*key, "b", world.now_s)
        decode.live.add(key)
        for _ in range(150):
            world.step()
    while not world.settled():
        world.step()
        assert world.now_s < 300
    assert world.succeeded == 40
