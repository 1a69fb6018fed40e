"""Images inside requests: data URLs (RFC 2397) and base64. Pure."""

import binascii
import re
from urllib.parse import unquote_to_bytes

from service.images.bad_image import BadImage

MOST_SHOWN = 40  # characters quoted in an error
VIDEO_FRAMES = "video/jpeg"  # a video as comma-separated base64 frames, as in vLLM

_ALPHABET = str.maketrans("-_", "+/", " \t\r\n")  # URL-safe base64, and line breaks
_MAGIC = {
    b"\xff\xd8\xff": "image/jpeg",
    b"\x89PNG": "image/png",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
    b"BM": "image/bmp",
}


def is_data_url(source: str) -> bool:
    return source[:5].lower() == "data:"


def data_of(url: str) -> bytes:
    head, text = _split(url)
    if head.lower().endswith(";base64"):
        return from_base64(text)
    return unquote_to_bytes(text)


def data_url(data: bytes) -> str:
    kind = next((kind for magic, kind in _MAGIC.items() if data.startswith(magic)), "application/octet-stream")
    return f"data:{kind};base64,{binascii.b2a_base64(data, newline=False).decode()}"


def frames_of(url: str) -> list[bytes]:
    head, text = _split(url) if is_data_url(url) else ("", "")
    if head.lower() != f"{VIDEO_FRAMES};base64":
        raise BadImage(
            f"a video must come as its frames, data:{VIDEO_FRAMES};base64,FRAME,FRAME...; got {url[:MOST_SHOWN]!r}; take frames out of the file"
        )
    return [from_base64(frame) for frame in text.split(",")]


def from_base64(text: str) -> bytes:
    plain = text.translate(_ALPHABET) if re.search(r"[-_\s]", text) else text
    plain = plain.rstrip("=")
    try:
        data = binascii.a2b_base64(plain + "=" * (-len(plain) % 4), strict_mode=True)
    except ValueError as error:  # not base64, or not ASCII
        raise BadImage(f"is not base64 ({str(error)[:80]})") from None
    if not data:
        raise BadImage("is empty; send an image")
    return data


def _split(url: str) -> tuple[str, str]:
    head, comma, text = url[5:].partition(",")
    if not comma:
        raise BadImage(f"is a data URL without a comma before its data: {url[:MOST_SHOWN]!r}")
    return head, text
