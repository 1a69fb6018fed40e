"""--enable-overlap-schedule: a CPU plans a step while another computes."""

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.flags.resolve import depth, resolve
from engine.model_files.model_config import WIDE_MODEL_PATH, load_model_config
from service.flags import ConfigError


def resolved(*, cuda: bool = False, **flags: Any) -> EngineConfig:
    return resolve(EngineConfig(model_path=WIDE_MODEL_PATH, **flags), load_model_config(WIDE_MODEL_PATH), cuda=cuda)


def test_steps_overlap_on_any_device_with_the_flag() -> None:
    found = resolved(enable_overlap_schedule=True)
    assert (found.stream, depth(found)) == ("threaded", 2)
    assert depth(resolved()) == 1
    found = resolved(enable_overlap_schedule=True, cuda=True)
    assert (found.stream, depth(found)) == ("cuda", 2)


@pytest.mark.parametrize(
    ("flags", "other"),
    [({"disable_overlap_schedule": True}, "--disable-overlap-schedule"), ({"stream": "inline"}, "--stream inline")],
)
def test_flags_that_contradict_are_refused(flags: dict[str, Any], other: str) -> None:
    with pytest.raises(ConfigError, match=f"^--enable-overlap-schedule: not with {other}; leave one of them out$"):
        resolved(enable_overlap_schedule=True, **flags)
