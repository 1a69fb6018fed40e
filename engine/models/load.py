"""Loads models of all families, and drafters."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.model_files.drafter_config import NEXTN, STANDALONE, DrafterConfig
from engine.model_files.model_config import ModelConfig
from engine.models.checkpoint import Checkpoint, Safetensors
from engine.models.decoder import DenseDecoder, Kept
from engine.models.draft_model import StandaloneModel
from engine.models.eagle import EagleLayer, NextnLayer
from engine.models.matrices import STORED, QuantizedMatrices
from engine.models.part import ModelPart
from engine.parallel.collectives import SINGLE_RANK, Collectives
from engine.parallel.expert_placement import IN_ORDER, ExpertPlan
from engine.parallel.layout import ALONE, Place
from engine.parallel.row_exchange import RowExchange
from engine.quant.integers import SCHEMES

Load = Callable[..., DenseDecoder]  # (model_path, config, progress=..., changes=...)


@dataclass(frozen=True, slots=True)
class ChangedFiles:
    """New tensors in `files`, as of `Checkpoint`; `model` runs without the last file's."""

    files: Sequence[str]
    model: DenseDecoder | None

    @property
    def kept(self) -> Kept:
        return Kept() if self.model is None else self.model.kept(Safetensors(None, self.files[-1:]).names())


def within(config: ModelConfig, context_length: int | None) -> ModelConfig:
    """A RoPE table of a million positions would take half a GiB."""
    most = config.max_position_embeddings
    return replace(config, max_position_embeddings=min(context_length or most, most))


def load_model(
    model_path: str,
    config: ModelConfig,
    *,
    dtype: str,
    device: str,
    progress: bool,
    place: Place = ALONE,
    collectives: Collectives = SINGLE_RANK,
    exchange: RowExchange | None = None,
    reduce_units: int = 0,
    quantization: str | None = None,
    experts: ExpertPlan = IN_ORDER,
    drafter: DrafterConfig | None = None,
    dummies: Collection[str] = (),
    changes: ChangedFiles | None = None,
) -> DenseDecoder:
    """Load this rank's part of `model_path` in `dtype` on `device`.

    `dtype`: "bfloat16" | "float32" | "float16". `collectives`: of the stage; `exchange`: of all
    ranks, with DP attention. `dummies`: paths with generated weights. `check_layout` has accepted
    the sizes. Raises ConfigError for files that do not fit.
    """
    weights: dict[str, Any] = {"stored": config.stored, "dummy": model_path in dummies}
    weights["changed"] = () if changes is None else changes.files
    with (
        torch.inference_mode(),
        Checkpoint(model_path, dtype=dtype, device=device, progress=progress, **weights) as checkpoint,
    ):
        part = ModelPart(
            config,
            checkpoint,
            place=place,
            collectives=collectives,
            exchange=exchange,
            reduce_units=reduce_units,
            matrices=QuantizedMatrices(SCHEMES[quantization]) if quantization else STORED,
            experts=experts,
        )
        nextn = NextnLayer(part.of_dp_rank()) if drafter is not None and drafter.kind == NEXTN else None
        model = DenseDecoder(part, None if changes is None else changes.kept)
        checkpoint.check_all_taken()
    if nextn is not None:
        nextn.use(model)
        model.draft_with(nextn)
    elif drafter is not None:
        own = {"dtype": dtype, "device": device, "progress": progress}
        shared = {"place": place.in_dp_rank(), "collectives": collectives, "reduce_units": reduce_units}
        if drafter.kind == STANDALONE:
            layers = within(replace(drafter.layers, vision=None), config.max_position_embeddings)  # it drafts text only
            other = load_model(drafter.path, layers, dummies=dummies, **own, **shared)
            model.draft_with(StandaloneModel(other))
        else:
            own["dummy"] = drafter.path in dummies
            model.draft_with(_eagle(drafter, model, config.max_position_embeddings, own, shared))
    return model


def _eagle(
    drafter: DrafterConfig, model: DenseDecoder, positions: int, own: dict[str, Any], shared: dict[str, Any]
) -> EagleLayer:
    config = replace(drafter.layers, max_position_embeddings=positions)
    with torch.inference_mode(), Checkpoint(drafter.path, **own) as checkpoint:
        eagle = EagleLayer(ModelPart(config, checkpoint, **shared), drafter, model)
        checkpoint.check_all_taken()
    return eagle
