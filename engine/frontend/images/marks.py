"""The placeholder and marker tokens of a vision model, as text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Marks:
    """Texts of the tokens that `VisionConfig` names; "": it has no such token, or there is no tokenizer."""

    image: str = ""
    video: str = ""
    start: str = ""
    end: str = ""


NO_MARKS = Marks()
