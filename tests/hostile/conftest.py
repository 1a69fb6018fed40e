"""One set of servers for all files here. They change nothing that another test would see."""

from collections.abc import Iterator

import pytest

from tests.hostile.doors import Doors, start_doors


@pytest.fixture(scope="package")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    with start_doors(tmp_path_factory.mktemp("doors")) as started:
        yield started
