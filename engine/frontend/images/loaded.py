"""An image or a video, loaded for its prompt."""

from dataclasses import dataclass

from engine.images import ImageInput


@dataclass(frozen=True, slots=True)
class LoadedMedia:
    """An image or a video. Each of `parts` has one placeholder in the prompt, and no `start` yet.

    `times_s`: timestamps of a video's parts, which the prompt states as text; empty: none.
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
