"""Models that see images: features, logits and answers equal those of transformers, fp32, from the files that it writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engine.model_files.model_config import load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from engine.parallel.layout import Place, check_layout
from service.flags import ConfigError
from tests.models.test_parity import random_ids
from tests.models.tiny_checkpoints import edit_tensors
from tests.models.tiny_seeing import (
    FAMILIES,
    Prompt,
    PromptMaker,
    features_of,
    logits_of,
    make_seeing_checkpoint,
    their_patches,
    their_values,
    two_images,
)

ANSWER = random_ids(16, seed=9)
Opened = tuple[str, DenseDecoder, PreTrainedModel, str]


def ours_of(path: str, *, dtype: str = "float32", **given: Any) -> DenseDecoder:
    return load_model(path, load_model_config(path), dtype=dtype, device="cpu", progress=False, **given)


def theirs_of(path: str, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


@pytest.fixture(scope="module", params=FAMILIES)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    path = make_seeing_checkpoint(tmp_path_factory.mktemp("seeing") / request.param, request.param)
    return request.param, ours_of(path), theirs_of(path), path


def pixels_of(family: str, prompt: Prompt) -> dict[str, torch.Tensor]:
    """What transformers' forward takes beside the ids."""
    if family == "llava":
        return {"pixel_values": torch.cat([their_values(frames).permute(0, 3, 1, 2) for frames in prompt.frames])}
    grids, patches = [torch.tensor([image.grid]) for image in prompt.images], list(map(their_patches, prompt.frames))
    found: dict[str, torch.Tensor] = {}
    for kind, values, grid in ((1, "pixel_values", "image_grid_thw"), (2, "pixel_values_videos", "video_grid_thw")):
        own = [i for i, image in enumerate(prompt.images) if prompt.kinds[image.start] == kind]
        if own:
            found |= {values: torch.cat([patches[i] for i in own]), grid: torch.cat([grids[i] for i in own])}
    return found


def their_features(family: str, model: PreTrainedModel, pixels: dict[str, torch.Tensor]) -> torch.Tensor:
    """[all tokens, feature size]."""
    with torch.inference_mode():
        found = model.model.get_image_features(**pixels, return_dict=True)
    levels = [torch.cat(list(level)) for level in getattr(found, "deepstack_features", None) or []]
    return torch.cat([torch.cat(list(found.pooler_output)), *levels], 1)


def their_logits(
    family: str, model: PreTrainedModel, prompt: Prompt, pixels: dict[str, torch.Tensor], answer: list[int]
) -> torch.Tensor:
    ids = torch.tensor([prompt.ids + answer])
    kinds = {} if family == "llava" else {"mm_token_type_ids": torch.tensor([prompt.kinds + [0] * len(answer)])}
    with torch.inference_mode():
        return model(input_ids=ids, **pixels, **kinds).logits[0]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


def test_features_are_those_of_transformers(opened: Opened) -> None:
    family, ours, theirs, _ = opened
    prompt = two_images(family)
    close(torch.cat(features_of(ours, prompt)), their_features(family, theirs, pixels_of(family, prompt)))


def test_logits_are_those_of_transformers_wherever_a_prompt_is_cut(opened: Opened) -> None:
    """Before, in and behind images; then an answer token by token."""
    family, ours, theirs, _ = opened
    prompt = two_images(family)
    wanted = their_logits(family, theirs, prompt, pixels_of(family, prompt), ANSWER)
    for cuts in ([], [3, 9, 14, 30], [11, 12, 27]):
        close(logits_of(ours, prompt, ANSWER, cuts=cuts), wanted)


def test_text_alone_is_as_without_a_tower(opened: Opened) -> None:
    family, ours, theirs, _ = opened
    prompt = PromptMaker().text(20).done()
    close(logits_of(ours, prompt, ANSWER, cuts=[7]), their_logits(family, theirs, prompt, {}, ANSWER))


def test_the_features_of_an_image_do_not_depend_on_others(opened: Opened) -> None:
    family, ours, _, _ = opened
    prompt = two_images(family)
    alone = features_of(ours, prompt._replace(images=prompt.images[1:], frames=prompt.frames[1:]))
    assert torch.equal(alone[0], features_of(ours, prompt)[1])


def video_of(family: str) -> tuple[Prompt, Prompt]:
    """(as we take it, as transformers does): an image, then a video of 3 frames, of which the last comes again in its temporal patch.

    Of Qwen2.5-VL both are one; 2 positions a step stay below rows and columns, since else transformers 5 lets text overlap the video's
    times. Later families take each temporal patch as an image, with its time as text before it.
    """
    maker = PromptMaker().text(3).image(4, 4).text(2)
    if family == "qwen2_5_vl":
        prompt = maker.image(4, 6, time=2, frames=3, time_step=2, kind=2).text(4).done()
        return prompt, prompt
    prompt = maker.image(4, 6, frames=2, kind=2).text(2).image(4, 6, frames=1, kind=2).text(4).done()
    still, first, _ = prompt.images
    whole = [still, replace(first, grid=(2, 4, 6))]
    return prompt, prompt._replace(images=whole, frames=[prompt.frames[0], torch.cat(prompt.frames[1:])])


def test_a_video_is_seen_as_transformers_does(opened: Opened) -> None:
    family, ours, theirs, path = opened
    if family == "llava":
        vision = load_model_config(path).vision
        assert vision is not None and vision.video_token_id is None, "it takes none"
        return
    prompt, whole = video_of(family)
    wanted = their_logits(family, theirs, prompt, pixels_of(family, whole), ANSWER)
    close(logits_of(ours, prompt, ANSWER, cuts=[8, 15]), wanted)


def test_bf16_is_as_near_to_fp32_as_transformers(opened: Opened) -> None:
    family, _, exact, path = opened
    prompt = two_images(family)
    pixels = pixels_of(family, prompt)
    wanted = their_features(family, exact, pixels)
    theirs = their_features(family, theirs_of(path, dtype=torch.bfloat16), pixels)
    ours = torch.cat(features_of(ours_of(path, dtype="bfloat16"), prompt))
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - wanted).norm() <= 1.5 * (theirs.float() - wanted).norm()


def test_patches_are_those_of_transformers_processor(tmp_path: Path) -> None:
    """So the other tests' own patches are, too."""
    processor = Qwen2VLImageProcessorPil.from_pretrained(make_seeing_checkpoint(tmp_path, "qwen2_5_vl"))
    for frames in two_images("qwen2_5_vl").frames:
        theirs = processor(images=[Image.fromarray(frames[0].numpy())], return_tensors="pt")["pixel_values"]
        assert torch.equal(their_patches(frames), theirs)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava-qwen2": ("llava", {"text_config": {**FAMILIES["llava"]["text_config"], "model_type": "qwen2"}}),
    "llava-all-rows-of-two-states": (
        "llava",
        {"vision_feature_layer": [-1, 1], "vision_feature_select_strategy": "full", "image_seq_length": 17},
    ),
    "qwen2-5-tied": ("qwen2_5_vl", {"tie_word_embeddings": True}),
    "qwen3-without-deepstack": (
        "qwen3_vl",
        {"vision_config": {**FAMILIES["qwen3_vl"]["vision_config"], "deepstack_visual_indexes": []}},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_have_the_logits_of_transformers(variant: str, tmp_path: Path) -> None:
    family, fields = VARIANTS[variant]
    path = make_seeing_checkpoint(tmp_path, family, **fields)
    prompt = two_images(family, count=fields.get("image_seq_length", 16))
    wanted = their_logits(family, theirs_of(path), prompt, pixels_of(family, prompt), ANSWER)
    close(logits_of(ours_of(path), prompt, ANSWER, cuts=[9, 14]), wanted)


OLD_NAMES = {  # of transformers 5, and 4
    "llava": (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ),
    "qwen2_5_vl": (("model.visual.", "visual."), ("model.language_model.", "model.")),
}


@pytest.mark.parametrize("family", OLD_NAMES)
def test_names_of_both_transformers_are_read(family: str, tmp_path: Path) -> None:
    """One of the two is what `save_pretrained` writes."""
    path, prompt = make_seeing_checkpoint(tmp_path, family), two_images(family)
    wanted = logits_of(ours_of(path), prompt, ANSWER, cuts=[])
    edit_tensors(tmp_path / "model.safetensors", lambda tensors: _rename(tensors, OLD_NAMES[family]))
    assert torch.equal(logits_of(ours_of(path), prompt, ANSWER, cuts=[]), wanted)


def _rename(tensors: dict[str, torch.Tensor], pairs: tuple[tuple[str, str], ...]) -> None:
    """From either kind of names to the other."""
    is_new = "model.language_model.embed_tokens.weight" in tensors
    for name in list(tensors):
        ways = [pair if is_new else pair[::-1] for pair in pairs]
        before, after = next(way for way in (*ways, ("", "")) if name.startswith(way[0]))
        tensors[name.replace(before, after, 1)] = tensors.pop(name)


def test_stacked_experts_may_have_inputs_first(tmp_path: Path) -> None:
    """As published, or outputs first."""
    path, prompt = make_seeing_checkpoint(tmp_path, "qwen3_vl_moe"), two_images("qwen3_vl_moe")
    wanted = logits_of(ours_of(path), prompt, ANSWER, cuts=[])
    edit_tensors(tmp_path / "model.safetensors", _transpose)
    assert torch.equal(logits_of(ours_of(path), prompt, ANSWER, cuts=[]), wanted)


def _transpose(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if ".experts." in name:
            tensors[name] = tensors[name].mT.contiguous()


def test_a_tensor_that_no_part_has_is_named(tmp_path: Path) -> None:
    path = make_seeing_checkpoint(tmp_path, "qwen3_vl")
    edit_tensors(
        tmp_path / "model.safetensors", lambda tensors: tensors.update({"model.visual.other.weight": torch.ones(2)})
    )
    with pytest.raises(ConfigError, match=r"tensor visual\.other\.weight is not part of the model"):
        ours_of(path)


def test_the_first_stage_has_the_tower_and_the_layers_that_images_add_to(tmp_path: Path) -> None:
    path = make_seeing_checkpoint(tmp_path, "qwen3_vl")
    assert ours_of(path, place=Place(pp_rank=1, pp_size=2)).vision is None
    assert ours_of(path, place=Place(pp_rank=0, pp_size=2)).vision is not None
    message = "--pp-layer-partition 1,3: the first stage has 1 layers, and images add to the states behind 2; give it 2"
    with pytest.raises(ConfigError, match=message):
        check_layout(load_model_config(path), tp_size=1, pp_size=2, partition=[1, 3])
