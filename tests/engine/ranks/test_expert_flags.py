"""Places of experts that a file gives: what fits, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.flags.expert_flags import expert_plan
from engine.model_files.model_config import load_model_config
from service.flags import ConfigError
from tests.models.tiny_checkpoints import make_tiny_checkpoint

ORDER = list(range(8))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("flags"), "glm4_moe")  # the first of its layers is dense


def plan(model: str, file: Path, **flags: Any) -> Any:
    given = {"tp_size": 2, "ep_size": 2, "init_expert_location": str(file), **flags}
    return expert_plan(EngineConfig(model_path=model, **given), load_model_config(model))


def test_places_and_loads_are_read(model: str, tmp_path: Path) -> None:
    file = tmp_path / "places.json"
    file.write_text(json.dumps({"physical_to_logical_map": [[0] * 8, ORDER[::-1], ORDER, ORDER]}))
    assert plan(model, file).placement(1, 8) == tuple(ORDER[::-1])
    file.write_text(json.dumps({"logical_count": [[0] * 8, [9, 8, 1, 1, 1, 1, 1, 1], [0] * 8, [0] * 8]}))
    found = plan(model, file, enable_eplb=True, eplb_rebalance_num_iterations=7, ep_num_redundant_experts=2)
    assert found.rebalance_every == 7 and sorted(found.placement(1, 8)) == [0, 0, 1, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must be an object with physical_to_logical_map or logical_count"),
        (json.dumps({"logical_count": [ORDER]}), "logical_count must be 4 lists, one for each layer, of 8 numbers"),
        (json.dumps({"logical_count": [[-1] * 8] * 4}), "logical_count must hold whole numbers from 0"),
        (json.dumps({"logical_count": [[True] * 8] * 4}), "logical_count must hold whole numbers from 0"),
        (
            json.dumps({"physical_to_logical_map": [ORDER, ORDER, [0] * 8, ORDER]}),
            r"physical_to_logical_map\[2\] must name each of the experts 0..7, and none else",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(model: str, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "places.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"--init-expert-location .*: {said}"):
        plan(model, file)


def test_a_missing_file_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read as JSON .*give trivial or a file"):
        plan(model, tmp_path / "none.json")
