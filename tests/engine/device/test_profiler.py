"""What a profile may be asked for: an activity named twice is one, and what torch does not know is refused."""

import pytest
from torch.profiler import ProfilerActivity

from engine.executor.profiler import _activities
from service.flags import ConfigError


def test_an_activity_named_twice_is_one() -> None:
    """torch raises for it, which ended the scheduler."""
    assert _activities(("CPU",) * 1000) == [ProfilerActivity.CPU]
    with pytest.raises(ConfigError, match="activities: 'TPU' is not one of"):
        _activities(("CPU", "TPU"))
