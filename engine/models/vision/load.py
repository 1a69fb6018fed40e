"""Loads the vision tower of a model."""

from engine.model_files.tensor_names import CLIP, PROJECTOR, VISUAL
from engine.model_files.tower_config import ClipTower, LearnedTower
from engine.model_files.vision_config import VisionConfig
from engine.models.part import ModelPart
from engine.models.vision.clip import ProjectedClip
from engine.models.vision.learned import DeepstackTower
from engine.models.vision.tower import VisionTower
from engine.models.vision.weights import VisionWeights
from engine.models.vision.windowed import WindowedTower


def load_tower(part: ModelPart) -> VisionTower | None:
    """Load the tower on the first stage of a multimodal model. Raises ConfigError."""
    config = part.config.vision
    if config is None or not part.place.is_first_stage:
        return None
    assert config.deepstack_levels <= len(part.share.layers), "check_layout has accepted the stages"
    return _tower(part, config)


def _tower(part: ModelPart, config: VisionConfig) -> VisionTower:
    tower, processing, size = config.tower, config.processing, part.config.hidden_size
    if isinstance(tower, ClipTower):
        weights, projector = VisionWeights(part.checkpoint, CLIP), VisionWeights(part.checkpoint, PROJECTOR)
        return ProjectedClip(weights, projector, tower, processing, size=size)
    weights = VisionWeights(part.checkpoint, VISUAL)
    if isinstance(tower, LearnedTower):
        return DeepstackTower(weights, tower, processing, size=size)
    return WindowedTower(weights, tower, processing, size=size)
