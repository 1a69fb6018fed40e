"""What lives when a process begins to serve is left alone by the collector; what it has left behind later is not.

That is for a process to do. A server that only lives in one (as in tests) would have it collect all that the process holds.
"""

import gc
import weakref
from collections.abc import Iterator

import pytest

from service.process.start import no_collections, spare_what_lives
from tests.router.dummies import cluster


class Circle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.freeze()


def test_the_second_time_drops_what_has_died_since_the_first() -> None:
    kept, left = Circle(), Circle()
    spare_what_lives()
    assert gc.get_freeze_count() > 0
    assert not any(other is kept for other in gc.get_objects())
    gone = weakref.ref(left)
    del left
    gc.collect()
    assert gone() is not None  # it was spared
    spare_what_lives()
    assert gone() is None and gc.get_freeze_count() > 0


async def test_a_router_inside_another_process_leaves_its_collector_alone() -> None:
    async with cluster():
        assert gc.get_freeze_count() == 0


def test_nothing_is_collected_inside_the_block_however_it_ends() -> None:
    with pytest.raises(ImportError), no_collections():
        inside = gc.isenabled()
        raise ImportError
    assert not inside and gc.isenabled()
