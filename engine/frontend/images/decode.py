"""Decodes images with Pillow, after a check of the size in the header (decompression bombs)."""

import contextlib
import io

from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from engine.frontend.images.sizes import Size
from service.images.bad_image import BadImage

PLUGINS = (JpegImagePlugin, PngImagePlugin, WebPImagePlugin, GifImagePlugin, BmpImagePlugin)
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # no other plugin is imported
WHITE = (255, 255, 255, 255)


def size_of(data: bytes, *, max_pixels: int) -> Size:
    """Return (height, width) before EXIF rotation. Raises BadImage."""
    with _open(data, max_pixels=max_pixels) as image:
        return image.height, image.width


def decode(data: bytes, *, max_pixels: int) -> Image.Image:
    """Upright RGB on white, of an animation the first frame. Raises BadImage."""
    with _open(data, max_pixels=max_pixels) as image:
        try:
            image.load()
            with contextlib.suppress(Exception):  # ignore unreadable EXIF
                ImageOps.exif_transpose(image, in_place=True)
            return _on_white(image)
        except Exception as error:  # Pillow raises anything for a broken file
            raise BadImage(f"cannot be decoded as {image.format} ({_one_line(error)}); is it whole?") from None


def _on_white(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image)
    return image.convert("RGB")


def _open(data: bytes, *, max_pixels: int) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large(max_pixels) from None
    except Exception as error:  # as above
        known = ", ".join(FORMATS)
        why = "" if isinstance(error, UnidentifiedImageError) else f" ({_one_line(error)})"
        raise BadImage(f"is no image that can be read{why}; send {known}") from None
    if image.width * image.height > max_pixels:
        image.close()
        raise _too_large(max_pixels)
    return image


def _too_large(max_pixels: int) -> BadImage:
    return BadImage(f"has more than {max_pixels} pixels; send a smaller one")


def _one_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:100]
