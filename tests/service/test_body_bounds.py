"""What a body may hold, compressed or not: bounds that refuse it before anything is made of it."""

import asyncio
import gzip
import random
import threading
import zlib

import httpx2 as httpx
import pytest
from fastapi import Response

from service.http import errors
from service.http import request as request_module
from service.http.errors import (
    ALWAYS_BYTES,
    MAX_PARTS,
    MAX_TIMES,
    MAX_VALUES,
    ApiError,
    RequestLimits,
    check_bounds,
    coding_of,
    inflate,
)
from service.http.guard import answer_of
from service.http.listening import open_port
from service.http.request import HttpRequest, asgi_app
from service.http.routes import json_response
from service.http.server import serving
from service.waiter import BODIES

MOST = 16 << 20
LIMITS = RequestLimits(max_body_bytes=1 << 20)
JSON = {"Content-Type": "application/json"}


def refused(data: bytes, coding: str = "gzip", *, most_bytes: int = MOST) -> ApiError:
    with pytest.raises(ApiError) as caught:
        inflate(data, coding, most_bytes=most_bytes)
    return caught.value


def raw_deflate(body: bytes) -> bytes:
    made = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return made.compress(body) + made.flush()


@pytest.mark.parametrize("size", [0, 1, 100, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 300_001])
@pytest.mark.parametrize("fill", ["zeros", "noise", "text"])
def test_compressed_bodies_come_out_as_they_went_in(size: int, fill: str) -> None:
    makers = {"zeros": bytes, "noise": random.Random(size).randbytes, "text": lambda n: (b"k17 v42 " * n)[:n]}
    body = makers[fill](size)
    assert inflate(gzip.compress(body), "gzip", most_bytes=MOST) == body
    assert inflate(gzip.compress(body[: size // 2]) + gzip.compress(body[size // 2 :]), "gzip", most_bytes=MOST) == body
    assert inflate(zlib.compress(body), "deflate", most_bytes=MOST) == body
    assert inflate(raw_deflate(body), "deflate", most_bytes=MOST) == body


def test_a_body_that_inflates_to_too_much_is_refused_with_the_bound() -> None:
    bomb = gzip.compress(b" " * (45 << 20))
    error = refused(bomb, most_bytes=64 << 20)
    assert error.status == 413 and error.code == "body_too_large"
    assert f"more than {MAX_TIMES * len(bomb)} bytes" in error.message
    assert f"more than {ALWAYS_BYTES} bytes" in refused(zlib.compress(b" " * (2 << 20)), "deflate").message
    noise = random.Random(1).randbytes(3000)
    assert "more than 2000 bytes" in refused(gzip.compress(noise), most_bytes=2000).message
    assert inflate(gzip.compress(b" " * ALWAYS_BYTES), "gzip", most_bytes=MOST) == b" " * ALWAYS_BYTES


def test_broken_bodies_and_too_many_members_are_refused() -> None:
    whole = gzip.compress(b"k17 " * 100)
    for broken in (whole[:-1], whole[:20], b"abcd", whole + b"x", gzip.compress(b"") * 2000):
        error = refused(broken)
        assert error.status == 400 and "cannot be read as gzip" in error.message


def test_codings_that_are_not_read_are_named() -> None:
    assert [coding_of(name) for name in ("", "identity", "utf-8", " GZIP ", "x-gzip", "deflate")] == [
        *("", "", "", "gzip", "x-gzip", "deflate")
    ]
    for name in ("br", "zstd", "gzip, gzip", "compress"):
        with pytest.raises(ApiError, match=name) as caught:
            coding_of(name)
        assert caught.value.status == 415


@pytest.mark.parametrize(
    ("entry", "count", "fits"),
    [
        (b"1,", MAX_VALUES - 2, True),
        (b"1,", MAX_VALUES, False),
        (b"[],", MAX_PARTS - 3, True),
        (b"[],", MAX_PARTS, False),
        (b'"a,[{",', MAX_PARTS - 3, True),
        (b'"",', MAX_PARTS, False),
        (rb'"\\", "\",[",', MAX_PARTS // 2 - 2, True),
        (b'{"k": 1},', MAX_PARTS // 2, False),
        (b'{"role": "user", "content": "k17"},', 200_000, False),
    ],
)
def test_a_body_of_too_many_values_is_refused(entry: bytes, count: int, fits: bool) -> None:
    body = b'{"a": [' + entry * count + b"0]}"
    if fits:
        return check_bounds(body)
    with pytest.raises(ApiError, match=f"more than {MAX_PARTS} lists") as caught:
        check_bounds(body)
    assert caught.value.status == 413


@pytest.mark.parametrize("text", [b"[{,:", rb"\"[,", rb"\\,"])
def test_what_stands_in_texts_does_not_count(text: bytes) -> None:
    check_bounds(b'{"a": "' + text * MAX_VALUES + b'"}')


@pytest.mark.parametrize("run", [5, 6, 7, 8, 1000, 1001])
def test_pieces_stay_short_where_all_is_backslashes(run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call into C holds the interpreter for one piece."""
    seen: list[bytes] = []

    def noted(piece: bytes) -> bytes:
        seen.append(piece)
        return marks(piece)

    marks = errors._marks
    monkeypatch.setattr(errors, "_marks", noted)
    monkeypatch.setattr(errors, "_JSON_PIECE_BYTES", 8)
    monkeypatch.setattr(errors, "MAX_PARTS", 3)
    check_bounds(b'{"a":"' + b"\\" * run + (b'"' if run % 2 else b"") + b'[[[["}')
    assert max(map(len, seen)) <= 9


async def test_servers_refuse_such_bodies_and_inflate_beside_their_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def noted(data: bytes, coding: str, *, most_bytes: int) -> bytes:
        threads.append(threading.current_thread())
        return inflate(data, coding, most_bytes=most_bytes)

    monkeypatch.setattr(request_module, "inflate", noted)

    async def size(request: HttpRequest) -> Response:
        return json_response({"size": len(await request.read()), "again": len(await request.read())})

    async def handle(request: HttpRequest) -> Response:
        return await answer_of(size, request)

    long = gzip.compress(random.Random(1).randbytes(300_000))
    with open_port("127.0.0.1", 0) as port:
        async with (
            serving(port, asgi_app(handle, LIMITS), LIMITS, shutdown_timeout_s=0.1),
            httpx.AsyncClient() as http,
        ):

            async def post(body: bytes, **headers: str) -> httpx.Response:
                return await http.post(port.url, content=body, headers=JSON | headers)

            coded = {"Content-Encoding": "gzip"}
            assert (await post(long, **coded)).json() == {"size": 300_000, "again": 300_000}
            assert (await post(gzip.compress(bytes(70_000)), **coded)).json()["size"] == 70_000
            assert (await post(gzip.compress(bytes(2 << 20)), **coded)).status_code == 413
            assert (await post(b"[" + b"[]," * MAX_PARTS + b"1]")).status_code == 413
            assert (await post(long, **{"Content-Encoding": "br"})).status_code == 415
    assert threads[0] is not threading.main_thread() and threads[1] is threading.main_thread()


async def test_a_compressed_body_waits_for_no_huge_one() -> None:
    async def handle(request: HttpRequest) -> Response:
        return json_response(len(await request.read()))

    goes_on, body = threading.Event(), random.Random(1).randbytes(10_000)
    huge = asyncio.create_task(BODIES.run(goes_on.wait, size=1 << 30))
    try:
        with open_port("127.0.0.1", 0) as port:
            async with (
                serving(port, asgi_app(handle, LIMITS), LIMITS, shutdown_timeout_s=0.1),
                httpx.AsyncClient() as http,
            ):
                sent = http.post(port.url, content=gzip.compress(body), headers={"Content-Encoding": "gzip"})
                assert (await asyncio.wait_for(sent, 20)).json() == len(body)
                assert not huge.done()
    finally:
        goes_on.set()
        await huge
