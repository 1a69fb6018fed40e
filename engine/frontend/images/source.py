"""Sources of images."""

from dataclasses import dataclass

from service.images.bodies import MOST_SHOWN, is_data_url


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSource:
    """An image or video URL; `field`: its part of the request.

    `is_base64`: base64 if without a scheme. `fps`: frames per second.
    """

    field: str
    url: str
    is_video: bool = False
    is_base64: bool = False
    fps: float | None = None

    @property
    def is_remote(self) -> bool:
        is_here = is_data_url(self.url) or (self.is_base64 and "://" not in self.url[:MOST_SHOWN])
        return not self.is_video and not is_here
