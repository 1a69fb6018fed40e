"""The header that names encoder workers: what a router writes is what a worker reads, and nothing else is."""

import pytest

from service.http.image_encoders import MAX_ENCODERS, MAX_IMAGES, PURPOSE, ImageEncoder, read_header, write_header
from service.security.keys import sign

SECRET = b"a secret of the cluster"
ONE, TWO = ImageEncoder("10.0.0.1:5000", "e1"), ImageEncoder("[::1]:5001", "e2")


@pytest.mark.parametrize("encoders", [[ONE], [ONE, None, TWO, ONE], [None], []])
def test_a_worker_reads_what_the_router_wrote(encoders: list[ImageEncoder | None]) -> None:
    assert read_header(write_header(encoders, SECRET), SECRET) == encoders


def test_many_images_fit_a_header() -> None:
    workers = [
        ImageEncoder(f"[2001:db8:85a3::8a2e:370:7334]:{port}", "0123456789abcdef0123456789abcdef")
        for port in range(50000, 50000 + MAX_ENCODERS)
    ]
    encoders = [(*workers, None)[i % (MAX_ENCODERS + 1)] for i in range(MAX_IMAGES)]
    header = write_header(encoders, SECRET)
    assert len(header) < 8190 and read_header(header, SECRET) == encoders


def test_what_exceeds_the_bounds_is_encoded_by_the_worker() -> None:
    many = [ImageEncoder(f"10.0.0.1:{port}", "e") for port in range(1, MAX_ENCODERS + 3)]
    assert read_header(write_header(many, SECRET), SECRET) == [*many[:MAX_ENCODERS], None, None]
    assert read_header(write_header([ONE] * (MAX_IMAGES + 1), SECRET), SECRET) == [ONE] * MAX_IMAGES


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "nonsense", "[]", '{"encoders": [], "images": [0]}'),
        '{"encoders": [{"control": "a:1", "incarnation": "e"}], "images": [-1]}',
        '{"encoders": [{"control": "a:1", "incarnation": "e"}], "images": [1]}',
        '{"encoders": [{"control": "a:1"}], "images": [0]}',
        '{"encoders": [{"control": 7, "incarnation": "e"}], "images": [0]}',
        '{"encoders": [{"control": "' + "a" * 301 + '", "incarnation": "e"}], "images": [0]}',
        '{"encoders": [], "images": ' + str([None] * (MAX_IMAGES + 1)).replace("None", "null") + "}",
        "[" * 100_000,
    ],
)
def test_junk_names_nothing(text: str) -> None:
    assert read_header(f"{sign(text.encode(), SECRET, purpose=PURPOSE)} {text}", SECRET) is None


def test_another_secret_names_nothing() -> None:
    header = write_header([ONE], SECRET)
    assert read_header(header, b"another secret here") is None
    assert read_header(header.replace("10.0.0.1", "10.0.0.2"), SECRET) is None
    assert read_header(header, None) is None, "without a secret no router is known"
