"""Checkpoints that several files serve."""

import pytest

from tests.models.tiny_checkpoints import make_tiny_checkpoint


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tiny, with random weights in fp32: every layer's every KV slot matters, and nothing ties."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")
