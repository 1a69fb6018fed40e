"""What holds for every test: a run stops at once, with one line, where the machine lacks what its tests need; no test of
hypothesis depends on how fast the machine is.
"""

import pytest
from hypothesis import HealthCheck, settings

from tests.machine.needs import complaint

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # a process of pytest-xdist: its controller has looked
    folder = config.invocation_params.dir
    if said := complaint([(folder / arg.partition("::")[0]).resolve() for arg in config.args]):
        raise pytest.UsageError(said)
