"""From image files to logits: the frontend's pixels and places and our towers, beside transformers' image processor and model."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil, Qwen2VLImageProcessorPil

from engine.frontend.images.pixels import PixelMaker
from engine.frontend.images.placeholders import NO_MARKS, expanded
from engine.images import ImageInput
from engine.model_files.model_config import load_model_config
from tests.frontend.vision import file_of, picture
from tests.models.test_seeing import ANSWER, close, ours_of, their_logits, theirs_of
from tests.models.tiny_seeing import IMAGE, Prompt, logits_of, make_seeing_checkpoint

FILES = [file_of(picture(37, 50, mode="RGBA", seed=1)), file_of(picture(90, 64, seed=2), "JPEG")]
IDS = [20, 21, IMAGE, 22, 23, 24, IMAGE, 25, 26]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava"])
def test_files_give_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    path = make_seeing_checkpoint(tmp_path / family, family)
    vision = load_model_config(path).vision
    assert vision is not None
    maker = PixelMaker(vision, max_pixels=1 << 20)
    loaded = [maker.image(data, maker.image_key(data)) for data in FILES]
    ids, images = expanded(IDS, loaded, vision, marks=NO_MARKS, field="input_ids")
    prompt = Prompt(ids, images, [frames_of(image) for image in images], [int(token == IMAGE) for token in ids])
    wanted = their_logits(family, theirs_of(path), prompt, their_pixels(family, path), ANSWER)
    close(logits_of(ours_of(path), prompt, ANSWER, cuts=[len(ids) // 2]), wanted)


def frames_of(image: ImageInput) -> torch.Tensor:
    return torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).reshape(*image.size, 3)


def their_pixels(family: str, path: str) -> Any:
    processor_class = CLIPImageProcessorPil if family == "llava" else Qwen2VLImageProcessorPil
    processor = processor_class.from_pretrained(path)
    return dict(processor(images=[Image.open(io.BytesIO(data)) for data in FILES], return_tensors="pt"))
