"""Every fault of a Mooncake Store, with a real master and real clients (tools/faults/stores/rows.py)."""

from collections.abc import Iterator

import pytest

from tools.faults.stores.processes import Processes, processes
from tools.faults.stores.rows import FAST, SLOW


@pytest.fixture(scope="module")
def all_of() -> Iterator[Processes]:
    with processes() as started:
        yield started


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_fault_is_a_miss_and_never_wrong_bytes(name: str, all_of: Processes) -> None:
    assert (FAST | SLOW)[name](all_of)
