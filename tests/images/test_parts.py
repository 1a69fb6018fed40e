"""Data URLs and base64, and where bodies hold images."""

import base64
import json
from typing import Any

import pytest

from service.images.bodies import BadImage, data_of, data_url, frames_of, from_base64, images_in, urls_in

DATA = bytes(range(256))
TEXT = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        TEXT.rstrip("="),
        base64.urlsafe_b64encode(DATA).decode(),
        base64.encodebytes(DATA).decode(),
        f" {TEXT}\r\n",
    ],
)
def test_base64_in_each_of_its_forms(text: str) -> None:
    assert from_base64(text) == DATA


@pytest.mark.parametrize("text", ["", "=", "A", "AA=A", "A===", "!AAA", "AAAA=BBB", "\u00e9AAA", "http://a.org/b"])
def test_what_is_no_base64(text: str) -> None:
    with pytest.raises(BadImage):
        from_base64(text)


def test_data_urls() -> None:
    assert data_of(f"data:image/png;base64,{TEXT}") == data_of(f"DATA:;charset=x;BASE64,{TEXT}") == DATA
    assert data_of("data:image/bmp,BM%00%ff") == b"BM\x00\xff"
    for data in (b"\xff\xd8\xffx", b"\x89PNG", b"GIF89a", b"RIFF", b"BMx", b"?"):
        assert data_of(data_url(data)) == data
    assert data_url(b"\x89PNG").startswith("data:image/png;base64,")
    with pytest.raises(BadImage, match="without a comma"):
        data_of("data:image/png;base64")


def test_frames() -> None:
    assert frames_of("data:video/jpeg;base64,QQ==,Qg") == [b"A", b"B"]
    for url in ("data:video/mp4;base64,QQ==", "https://a.org/b.mp4", "QQ==", "data:video/jpeg,QQ=="):
        with pytest.raises(BadImage, match="take frames out of the file"):
            frames_of(url)
    with pytest.raises(BadImage, match="is empty"):
        frames_of("data:video/jpeg;base64,QQ==,")


def put_all(value: Any, path: str) -> list[tuple[str, str]]:
    found = list(images_in(value, path))
    for image in found:
        image.put("X")
    return [(image.field, image.url) for image in found]


def test_images_in_messages_of_each_api() -> None:
    source = {"type": "url", "url": "U3"}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "image_url", "image_url": {"url": "U1"}}]},
        {"type": "message", "content": [{"type": "input_image", "image_url": "U2"}]},
        {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image", "source": source}]}]},
        {"type": "function_call_output", "output": [{"type": "input_image", "image_url": "U4"}]},
        {"role": "user", "content": "c", "images": ["U5"]},
        {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "U6"}}]},
        {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "U7"}}]},
    ]
    assert put_all(messages, "m") == [
        ("m[1].content[1].image_url", "U1"),
        ("m[2].content[0].image_url", "U2"),
        ("m[3].content[0].content[0].source", "U3"),
        ("m[4].output[0].image_url", "U4"),
        ("m[5].images[0]", "U5"),
        ("m[6].content[0].source", "U6"),
        ("m[7].content[0].video_url", "U7"),
    ]
    assert "U" not in json.dumps(messages).replace("URL", "") and json.dumps(messages).count('"X"') == 7


def test_nothing_is_found_elsewhere() -> None:
    call = {"function": {"arguments": {"type": "image_url", "image_url": "U"}}}
    wrong = [
        None,
        5,
        {"content": 5},
        {"type": "image", "source": 5},
        {"type": "image_url"},
        {"type": "image_url", "image_url": 5},
    ]
    assert put_all([{"role": "assistant", "tool_calls": [call]}, *wrong, {"content": wrong}, {"images": 5}], "m") == []


def test_images_in_lists() -> None:
    body = {"image_data": [["A", None], "B"], "one": "C", "video_data": [["D"]]}
    found = [image for name in (*body, "none") for image in urls_in(body, name, name)]
    assert [(image.field, image.url, image.is_video) for image in found] == [
        ("image_data[0][0]", "A", False),
        ("image_data[1]", "B", False),
        ("one", "C", False),
        ("video_data[0][0]", "D", True),
    ]
    for image in found:
        image.put("X")
    assert body == {"image_data": [["X", None], "X"], "one": "X", "video_data": [["X"]]}
