"""What holds for every test: a run stops at once, with one line, where the machine lacks what its tests need; no test of
hypothesis depends on how fast the machine is.
"""

import gc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.machine.needs import complaint

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

TESTS = Path(__file__).parent
SHARED = (
    "e2e/shared",
    "e2e/tiny",
    "hostile",
)  # folders whose files share servers: one process of pytest-xdist runs all of each
LONG = (*SHARED, "e2e", "faults")

gc.disable()  # while a million objects are imported and collected, which then live to the end


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole clusters first: at the end, one process would be left alone with files of a minute each."""
    items.sort(key=lambda item: next((i for i, folder in enumerate(LONG) if _lies_in(item, folder)), len(LONG)))
    for item in items:
        group = next((folder for folder in SHARED if _lies_in(item, folder)), str(item.path))
        item.add_marker(pytest.mark.xdist_group(group))


def _lies_in(item: pytest.Item, folder: str) -> bool:
    return item.path.is_relative_to(TESTS / folder)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # a process of pytest-xdist: its controller has looked
    folder = config.invocation_params.dir
    if said := complaint([(folder / arg.partition("::")[0]).resolve() for arg in config.args]):
        raise pytest.UsageError(said)
