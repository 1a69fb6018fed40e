"""A tiny checkpoint of each family and the same model in transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models.tiny_checkpoints import ARCHITECTURES, make_tiny_checkpoint
from tests.one_thread import one_thread  # noqa: F401 (a fixture of every test here)


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def reference(checkpoint: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
