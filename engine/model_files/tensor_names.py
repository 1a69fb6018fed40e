"""Names of tensors in files of models that see images, as transformers 5 and 4 write them, and ours. Never torch."""

TEXT_PARTS = ("model.language_model.", "language_model.model.")
VISUAL, CLIP, PROJECTOR = "visual.", "vision_tower.", "multi_modal_projector."  # our names of towers and projectors
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
    """Return our name of a tensor or module of the language model."""
    part = next((part for part in TEXT_PARTS if name.startswith(part)), None)
    return name if part is None else name.replace(part, "model.", 1)


def is_seeing(name: str) -> bool:
    """Whether a tensor or module belongs to a vision tower or its projector."""
    return name.startswith((*SEEING_PARTS, VISUAL))
