from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.transfer.rig import Pair


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    """Makes pairs, checks and closes them at the end."""
    with ExitStack() as stack:

        def make(*args: Any, **config: Any) -> Pair:
            pair = Pair(*args, **config)
            stack.callback(pair.close)
            return pair

        yield make
