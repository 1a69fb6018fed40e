"""Made-up weights (--load-format dummy): equal wherever they are made, in parts as whole, and no file but config.json is read."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.encoder import load_tower_alone
from engine.flags.resolve import resolve
from engine.kv.kv_pool import fingerprint, fingerprint_of, weights_number
from engine.model_files.model_config import load_model_config
from engine.models import dummy_weights
from engine.models.checkpoint import Checkpoint
from engine.models.load import load_model
from engine.models.vision.tower import Pixels
from engine.parallel.layout import Cut
from service.flags import ConfigError
from tests.engine.drafts.drafters import answers_to
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.ranks_in_process import ranks
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.models.tiny_gguf import make_tiny_gguf
from tests.models.tiny_seeing import make_seeing_checkpoint

DUMMY: dict[str, Any] = {"load_format": "dummy", "max_total_tokens": 1024, "num_threads": 1}
PROMPTS = [prompt_of(30, 1), prompt_of(9, 2)]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A checkpoint without its weights."""
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    (Path(path) / "model.safetensors").unlink()
    return path


def answers(path: str, **flags: Any) -> list[list[int]]:
    with EngineInProcess(path, **DUMMY, **flags) as engine:
        return answers_to(engine, PROMPTS, new=12)


def test_a_part_of_a_tensor_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few elements are made at once."""
    with Checkpoint("nowhere", dtype="float32", device="cpu", progress=False, dummy=True) as checkpoint:
        whole = checkpoint.take("a.weight", [7, 5, 6])
        other = checkpoint.take("b.weight", [7, 5, 6])
        monkeypatch.setattr(dummy_weights, "BLOCK", 8)
        part = checkpoint.take("a.weight", [Cut(7, range(2, 6)), 5, Cut(6, range(3, 6))])
    assert torch.equal(part, whole[2:6, :, 3:]) and not torch.equal(whole, other)
    assert abs(float(whole.std()) - dummy_weights.GAIN / 30**0.5) < 0.05


def test_a_tower_alone_is_that_of_the_whole_model(tmp_path: Path) -> None:
    """As an encoder worker loads it."""
    path = make_seeing_checkpoint(tmp_path / "model", "qwen3_vl")
    (tmp_path / "model" / "model.safetensors").unlink()
    given: dict[str, Any] = {"dtype": "float32", "device": "cpu", "progress": False, "dummies": (path,)}
    config = load_model_config(path)
    tower, model = load_tower_alone(path, config, **given), load_model(path, config, **given)
    assert config.vision is not None
    side = 4 * config.vision.tower.patch
    pixels = Pixels(torch.arange(side * side * 3).view(1, side, side, 3).to(torch.uint8), (1, 4, 4))
    assert model.vision is not None
    alone, whole = tower.vision.encode(pixels), model.vision.encode(pixels)
    assert torch.equal(alone, whole) and float(whole.std()) > 0


def test_two_folders_of_one_config_are_one_model_on_any_ranks(folder: str, tmp_path: Path) -> None:
    found = answers(folder)
    assert len(set(found[0])) > 3 and found[0] != found[1]
    shutil.copytree(folder, tmp_path / "copy")
    assert answers(str(tmp_path / "copy")) == found
    with ranks(folder, tp_size=2, **DUMMY) as group:
        assert answers_to(group.engine, PROMPTS, new=12) == found


def test_without_the_flag_the_files_are_missed(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        EngineInProcess(folder)


def test_a_file_with_its_weights_is_refused(tmp_path: Path) -> None:
    path, _ = make_tiny_gguf(tmp_path, "llama")
    file = str(path)
    with pytest.raises(ConfigError, match=f"^--load-format dummy: {file} is a file with its weights; give a directory"):
        resolve(EngineConfig(model_path=file, load_format="dummy"), load_model_config(file), cuda=False)


def test_made_up_weights_are_no_real_ones(tmp_path: Path) -> None:
    """A worker with them and one without share no KV."""
    path = make_tiny_checkpoint(tmp_path, "qwen3")
    assert fingerprint_of(EngineConfig(model_path=path, load_format="dummy")) == fingerprint(path, dummy=True)
    assert fingerprint(path, dummy=True) != fingerprint(path)
    assert weights_number(path, dummy=True) != weights_number(path)
