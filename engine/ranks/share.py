"""Loader of a rank's part of a checkpoint."""

from collections.abc import Callable
from functools import partial
from typing import Any

from engine.config import EngineConfig
from engine.flags.expert_flags import expert_plan
from engine.flags.load_format import dummy_paths
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from engine.ranks.links import RankLinks

Load = Callable[..., DenseDecoder]  # (model_path, config, progress=...)


def loader(config: EngineConfig, model: ModelConfig, links: RankLinks | None, load: Load = load_model) -> Load:
    """`links` is None for a single rank."""
    share: dict[str, Any] = {"reduce_units": config.reduce_units} if config.reduce_units or links else {}
    if model.drafter is not None:
        share["drafter"] = model.drafter
    if dummies := dummy_paths(config):
        share["dummies"] = dummies
    if links is not None:
        share |= {
            "place": links.place,
            "collectives": links.collectives,
            "exchange": links.exchange,
            "experts": expert_plan(config, model),
        }
    return partial(
        load,
        dtype=config.dtype,
        device=config.device,
        context_length=config.context_length,
        quantization=config.quantization,
        **share,
    )
