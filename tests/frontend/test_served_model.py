"""What a worker says of its model, and models that a role cannot serve."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.frontend.served_model import load_served_model
from service.flags import ConfigError
from tests.models.headless import make_embedding_model
from tests.models.tiny_checkpoints import make_tiny_checkpoint


def test_is_embedding_takes_the_head_away(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "llama")
    for given, generates in ((False, True), (True, False)):
        model = load_served_model(EngineConfig(model_path=path, is_embedding=given), mode="null")
        assert (model.head.kind == "tokens", model.info["is_generation"]) == (generates, generates)


def test_a_decode_worker_refuses_what_generates_nothing(tmp_path: Path) -> None:
    config = EngineConfig(model_path=make_embedding_model(tmp_path, bare=True))
    assert load_served_model(config, mode="prefill").head.kind == "nothing"
    says = r"--disaggregation-mode decode: the model of .* generates nothing.*tandem up --unified"
    with pytest.raises(ConfigError, match=says):
        load_served_model(config, mode="decode")
