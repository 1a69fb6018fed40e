"""A model with only its vision tower loaded."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.model_files.model_config import ModelConfig
from engine.model_files.tensor_names import CLIP, PROJECTOR, VISUAL
from engine.models.checkpoint import Checkpoint
from engine.models.part import ModelPart
from engine.models.vision.load import load_tower
from engine.models.vision.tower import VisionTower
from service.flags import ConfigError


@dataclass(frozen=True, slots=True)
class TowerModel:
    """The model as the image pass needs it."""

    vision: VisionTower
    collectives: None = None


def load_tower_alone(
    model_path: str, config: ModelConfig, *, dtype: str, device: str, progress: bool, dummies: Collection[str] = ()
) -> TowerModel:
    """Raises ConfigError for files that do not fit. `dummies`: models with dummy weights."""
    given: dict[str, Any] = {"dtype": dtype, "device": device, "stored": config.stored, "dummy": model_path in dummies}
    with (
        torch.inference_mode(),
        Checkpoint(model_path, progress=progress, **given) as checkpoint,
    ):
        checkpoint.ignore_all_but((VISUAL, CLIP, PROJECTOR))
        tower = load_tower(ModelPart(replace(config, stored=None), checkpoint))
        checkpoint.check_all_taken()
    if tower is None:
        raise ConfigError(
            f"--disaggregation-mode encode: the model of {model_path} sees no images; there is nothing to encode"
        )
    return TowerModel(tower)
