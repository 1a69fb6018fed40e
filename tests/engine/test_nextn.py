"""Layers that predict the token after the next (MTP) draft: answers are those of plain decoding."""

from pathlib import Path
from typing import Any

import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from engine.kernels.linear import linear_kernel
from engine.model_files.model_config import load_model_config
from service.flags import ConfigError
from tests.engine.drafters import always, fared
from tests.engine.ranks_in_process import ranks
from tests.engine.test_standalone_drafter import Answers, answers, ask_all
from tests.models.tiny_checkpoints import HYBRIDS, make_tiny_checkpoint

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "deepseek_v32", *HYBRIDS)
Path_ = tuple[str, Answers]


@pytest.fixture(scope="module", params=FAMILIES)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path_:
    folder = tmp_path_factory.mktemp(request.param)
    path = make_tiny_checkpoint(folder, request.param, dtype="bfloat16", num_nextn_predict_layers=1)
    return path, answers(path)[0]


def test_answers_are_those_of_plain_decoding(plain: Path_) -> None:
    check_answers(*plain, algorithm="NEXTN")


@pytest.mark.parametrize("plain", FAMILIES[:1], indirect=True)
def test_eagle_is_another_name_of_it(plain: Path_) -> None:
    """SGLang calls both so."""
    check_answers(*plain, algorithm="EAGLE")


def check_answers(path: str, wanted: Answers, *, algorithm: str) -> None:
    chunk = 32 if load_model_config(path).recurrent is None else 64
    said, how = answers(path, speculative_algorithm=algorithm, chunked_prefill_size=chunk)
    assert said == wanted
    assert how.passes > 0 and how.drafts > how.accepted


@pytest.mark.skipif(linear_kernel() is None, reason="--reduce-units needs the C kernel")
def test_ranks_draft_as_one_does(tmp_path: Path) -> None:
    """The layer's heads and experts are divided: its drafts, right and wrong ones, are those of one rank."""
    path = make_tiny_checkpoint(tmp_path, "qwen3_next", dtype="bfloat16", mtp_num_hidden_layers=1)
    flags: dict[str, Any] = {"speculative_algorithm": "NEXTN", "reduce_units": 2, "num_threads": 1}
    wanted = answers(path, sure=True, **flags)
    with ranks(path, tp_size=2, **flags) as group:
        always(group.engine.parts.scheduler)
        assert (ask_all(group.engine, sure=True), fared(group.engine)) == wanted


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "m", "deepseek_v3")
    for algorithm in ("NEXTN", "EAGLE"):
        config = EngineConfig(model_path=path, speculative_algorithm=algorithm, max_total_tokens=1024)
        said = f"--speculative-algorithm {algorithm}: the model's config.json has no num_nextn_predict_layers or"
        with pytest.raises(ConfigError, match=said):
            build_engine(config, load_model_config(path), progress=False)
