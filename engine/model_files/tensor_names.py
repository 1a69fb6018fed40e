"""Tensor names of multimodal models."""

TEXT_PARTS = ("model.language_model.", "language_model.model.")
VISUAL, CLIP, PROJECTOR = "visual.", "vision_tower.", "multi_modal_projector."  # our prefixes of towers and projectors
SEEING_PARTS = {
    "model.visual.": VISUAL,
    "model.vision_tower.vision_model.": CLIP,
    "model.vision_tower.": CLIP,
    "vision_tower.vision_model.": CLIP,
    "vision_tower.": CLIP,
    "model.multi_modal_projector.": PROJECTOR,
    "multi_modal_projector.": PROJECTOR,
}


def text_name(name: str) -> str:
    part = next((part for part in TEXT_PARTS if name.startswith(part)), None)
    return name if part is None else name.replace(part, "model.", 1)


def is_seeing(name: str) -> bool:
    return name.startswith((*SEEING_PARTS, VISUAL))
