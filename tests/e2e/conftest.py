"""Checkpoints that several files serve, and a folder."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.tiny_checkpoints import make_tiny_checkpoint


@pytest.fixture
def temp() -> Iterator[Path]:
    """What a cluster's processes may call the temporary directory (short: unix socket paths are)."""
    with tempfile.TemporaryDirectory(prefix="te-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tiny, with random weights in fp32: every layer's every KV slot matters, and nothing ties."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")
