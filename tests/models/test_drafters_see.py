"""What drafts with the model's embeddings gets features in the place of image tokens, as the model does."""

from pathlib import Path

import pytest
import torch

from engine.model_files.drafter_config import EAGLE, EAGLE3, NEXTN, load_eagle, nextn_of
from engine.model_files.model_config import load_model_config
from engine.models.load import load_model
from engine.models.vision.tower import NO_IMAGES, ImageRows, StepImages
from tests.models.reference_attend import Sequence
from tests.models.tiny_drafters import make_tiny_eagle
from tests.models.tiny_seeing import IMAGE, with_mtp

IDS = torch.tensor([20, IMAGE, 22, 23])


@pytest.mark.parametrize("kind", [NEXTN, EAGLE, EAGLE3])
def test_features_of_an_image_are_as_an_embedding_of_its_token(tmp_path: Path, kind: str) -> None:
    path = with_mtp(tmp_path / "sees", "qwen3_5")
    config = load_model_config(path)
    if kind == NEXTN:
        drafter_config = nextn_of(config, flag="")
    else:
        drafter_config = load_eagle(make_tiny_eagle(tmp_path / "drafts", kind), config, kind=kind)
    model = load_model(path, config, dtype="float32", device="cpu", progress=False, drafter=drafter_config)
    drafter, positions = model.drafter, torch.arange(len(IDS))
    assert drafter is not None
    generator = torch.Generator().manual_seed(1)
    before, features = (torch.randn((n, config.hidden_size), generator=generator) for n in (len(IDS), 1))

    def drafted(images: StepImages) -> torch.Tensor:
        with torch.inference_mode():
            return drafter.forward(IDS, before, positions, Sequence(model)._attend, images)

    seen, blind = drafted(ImageRows(torch.tensor([1]), features)), drafted(NO_IMAGES)
    with torch.inference_mode():
        model._embed._table[IMAGE] = features[0]  # type: ignore[attr-defined]
    assert torch.equal(seen, drafted(NO_IMAGES)) and not torch.allclose(seen, blind)
    assert torch.equal(seen[:1], blind[:1]), "what stands before it"
