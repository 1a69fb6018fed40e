"""Tensor names: those of other checkpoints become Llama's, towers' get a prefix of ours."""

from collections.abc import Collection

TEXT_PARTS = ("model.language_model.", "language_model.model.")
VISUAL, CLIP, PROJECTOR = "visual.", "vision_tower.", "multi_modal_projector."  # our prefixes of towers and projectors
VISION_PARTS = {
    "model.visual.": VISUAL,
    "model.vision_tower.vision_model.": CLIP,
    "model.vision_tower.": CLIP,
    "vision_tower.vision_model.": CLIP,
    "vision_tower.": CLIP,
    "model.multi_modal_projector.": PROJECTOR,
    "multi_modal_projector.": PROJECTOR,
}


def text_name(name: str) -> str:
    """Our name of a text model's tensor, `model.` instead of a multimodal model's prefix."""
    part = next((part for part in TEXT_PARTS if name.startswith(part)), None)
    return name if part is None else name.replace(part, "model.", 1)


def canonical_name(name: str) -> str:
    """Our name of any model's tensor, as `names_in_files` with the whole file."""
    for part, own in VISION_PARTS.items():
        if name.startswith(part):
            return name.replace(part, own, 1)
    text = text_name(name)
    return text if text != name else name.removeprefix("language_model.")


def is_multimodal(name: str) -> bool:
    return name.startswith((*VISION_PARTS, VISUAL))


def names_in_files(stored: Collection[str]) -> dict[str, str]:
    if "embed_tokens.weight" in stored:  # an embedding model, saved without a head
        return {name if name.startswith("score.") else f"model.{name}": name for name in stored}
    for part in TEXT_PARTS:
        if f"{part}embed_tokens.weight" in stored:
            text = {text_name(name): name for name in stored if name.startswith(part)}
            heads = {name.removeprefix("language_model."): name for name in stored}
            heads = {name: there for name, there in heads.items() if name.startswith(("lm_head.", "mtp."))}
            return text | heads | _vision_names(stored)
    return {name: name for name in stored}


def _vision_names(stored: Collection[str]) -> dict[str, str]:
    found = {}
    for name in stored:
        part = next((part for part in VISION_PARTS if name.startswith(part)), None)
        if part is not None:
            found[name.replace(part, VISION_PARTS[part], 1)] = name
    return found
