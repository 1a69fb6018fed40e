"""Placeholder and marker tokens of a multimodal model, as text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Marks:
    """Texts of `VisionConfig`'s tokens, empty if absent or without tokenizer."""

    image: str = ""
    video: str = ""
    start: str = ""
    end: str = ""


NO_MARKS = Marks()
