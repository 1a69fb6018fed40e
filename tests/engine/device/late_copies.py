"""The copies of a GPU in an engine on a CPU: beside the forward, as late as the order allows."""

from collections.abc import Callable

from torch import Tensor

from engine.kv.host_pool import WORD_BYTES, HostPool
from engine.kv.page_copies import DirectCopies, StagedCopies, word_cuts
from tests.engine.engine_in_process import EngineInProcess
from tests.hicache.streams_in_a_test import LateStream


def copy_late(engine: EngineInProcess, *, on_load: Callable[[int], None] = lambda layer: None) -> None:
    """`on_load` receives the first layer of each group that is copied."""
    host = host_pool(engine)
    pool, direct = engine.parts.pool, host._copies
    assert isinstance(direct, DirectCopies)
    cuts = word_cuts(pool.layer_ends(), WORD_BYTES)

    def copy_rows(target: Tensor, source: Tensor) -> None:
        on_load(cuts.index(source.storage_offset() % cuts[-1]))
        target.copy_(source)

    host._copies = StagedCopies(
        direct._device_pages,
        direct._host_pages,
        layer_cuts=cuts,
        units=pool.units,
        make_stream=LateStream,  # type: ignore[arg-type]
        copy_rows=copy_rows,
    )


def host_pool(engine: EngineInProcess) -> HostPool:
    host = engine.parts.device.executor.runner.copies._host_pool
    assert host is not None
    return host
