"""Loaded images and videos of a prompt."""

from dataclasses import dataclass

from engine.images import ImageInput


@dataclass(frozen=True, slots=True)
class LoadedMedia:
    """Media of a prompt.

    `parts` have one placeholder each and no `start` yet. `times_s`: timestamps for the prompt's
    text, if needed.
    """

    parts: tuple[ImageInput, ...]
    is_video: bool = False
    times_s: tuple[float, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_bytes(self) -> int:
        return sum(len(part.pixels) for part in self.parts)
