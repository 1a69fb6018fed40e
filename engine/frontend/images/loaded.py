"""An image or a video as its prompt gets it."""

from dataclasses import dataclass

from engine.images import ImageInput


@dataclass(frozen=True, slots=True)
class LoadedMedia:
    """An image or a video of a prompt. Each of `parts` has one place in it; its `start` is not known yet.

    `times_s`: of the parts of a video whose times the prompt's text says; empty: it says none.
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
