"""Where an image comes from."""

from dataclasses import dataclass

from service.images.data_urls import MOST_SHOWN, is_data_url


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSource:
    """An image, or with `is_video` a video, as a request names it: a URL. `field`: which part of the request it is.

    `is_base64`: without a scheme it is base64. `fps`: frames a second of a video.
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
