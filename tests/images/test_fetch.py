"""Images are fetched from outside within limits; nothing inside is reached, whatever names, redirects and hosts say. Real servers and sockets."""

import asyncio
import gzip
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from aiohttp import web

from service.images.bodies import BadImage
from service.images.fetch import MAX_REDIRECTS, ImageFetcher
from service.images.hosts import ImageFlags
from tests.images.hosts import (
    INSIDE,
    OUTSIDE,
    PNG,
    Names,
    answer_png,
    fetcher,
    host,
    raw_host,
    redirect_to,
)

MANY = 1 << 30


async def fetched(by: ImageFetcher, url: str, *, most_bytes: int = MANY) -> bytes | str:
    """The file, or why there is none."""
    (answer,) = (await by.fetch_all([url], most_bytes=most_bytes)).values()
    return str(answer) if isinstance(answer, BadImage) else answer


@contextmanager
def inside() -> Iterator[int]:
    """A port inside that nothing may connect to."""
    with socket.create_server((INSIDE, 0)) as listening:
        yield int(listening.getsockname()[1])
        listening.settimeout(0.0)
        with pytest.raises(BlockingIOError):  # no connection waits
            listening.accept()


async def test_a_file_comes_as_it_is() -> None:
    async with host(answer_png) as outside:
        assert await fetched(fetcher(), f"{outside.url}/a.png?b=c") == PNG
        ((path, headers),) = outside.seen
    assert path == "/a.png?b=c"
    assert (
        headers.keys() == {"host", "accept", "accept-encoding", "user-agent", "connection"}
        and headers["accept-encoding"] == "identity"
    )


async def test_a_url_is_fetched_once_and_nothing_is_kept() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=PNG, headers={"Set-Cookie": "a=b"})

    async with host(answer) as outside:
        by, urls = fetcher(), [f"{outside.url}/a", f"{outside.url}/b", f"{outside.url}/a"]
        for _ in range(2):
            assert set((await by.fetch_all(urls, most_bytes=MANY)).values()) == {PNG}
        assert len(outside.seen) == 4 and not any("cookie" in headers for _, headers in outside.seen)


async def test_redirects_are_followed() -> None:
    async with host(answer_png) as target, host(redirect_to("/b", f"{target.url}/c")) as outside:
        assert await fetched(fetcher(), f"{outside.url}/a") == PNG
        assert [path for path, _ in outside.seen] == ["/a", "/b"] and target.seen[0][0] == "/c"


# ---- nothing inside is reached


@pytest.mark.parametrize(
    "form",
    [
        *(
            "127.0.0.1",
            "localhost",
            "127.1",
            "2130706433",
            "0x7f000001",
            "0177.0.0.1",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "0.0.0.0",
        ),
        *("[::ffff:7f00:1]", "[::]", "localhost.", "LOCALHOST", "127.0.0.1.", "127。0。0。1", "①②⑦.0.0.1"),
        *("0", "017700000001", "0x7f.0x0.0x0.0x1", "0x100000001", "[::127.0.0.1]", "[::1%25lo]", "[fe80::1%25lo]"),
        *("[64:ff9b::127.0.0.1]", "[2002:7f00:1::]", "%31%32%37.0.0.1", "localhost%2e", "127.0.0.1%00", "ⓛocalhost"),
        *("127.0.0.1,a.org", "127.0.0.1 a.org", "xn--", "xn--a", "a" * 300, "a." * 130),
    ],
)
async def test_no_form_of_an_address_leads_inside(form: str) -> None:
    with inside() as port:
        why = await fetched(fetcher(), f"http://{form}:{port}/")
        assert isinstance(why, str) and "; send the image as a data URL" in why


@pytest.mark.parametrize(
    "address", [INSIDE, "169.254.169.254", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "fd00:ec2::254"]
)
async def test_no_name_leads_inside(address: str) -> None:
    with inside() as port:
        why = await fetched(fetcher(Names({"a.org": [[address]]})), f"http://a.org:{port}/")
        assert "no public address, and the server's own network is closed to it (--allowed-media-networks)" in str(why)
        assert address not in str(why)  # nor do answers tell what names inside mean


async def test_of_several_addresses_those_inside_are_left_out() -> None:
    async with host(answer_png) as outside:
        with inside():
            names = Names({"a.org": [[INSIDE, "::1", OUTSIDE, INSIDE]]})
            assert await fetched(fetcher(names), f"http://a.org:{outside.port}/") == PNG


async def test_a_name_that_changes_its_mind_leads_nowhere() -> None:
    """DNS rebinding: it is outside when it is first asked for, and inside when the next connection is made."""
    with inside() as port:
        async with host(redirect_to(f"http://a.org:{port}/")) as outside:
            names = Names({"a.org": [[OUTSIDE], [INSIDE]]})
            why = await fetched(fetcher(names), f"http://a.org:{outside.port}/")
            assert "no public address" in str(why) and names.num_asked == 2 and len(outside.seen) == 1


async def test_a_name_is_asked_for_once_for_a_connection() -> None:
    async with host(answer_png) as outside:
        names = Names({"a.org": [[OUTSIDE], [INSIDE]]})
        assert await fetched(fetcher(names), f"http://a.org:{outside.port}/") == PNG and names.num_asked == 1


async def test_redirects_are_checked_again() -> None:
    with inside() as port:
        for target in (
            f"http://{INSIDE}:{port}/",
            f"//localhost:{port}/",
            "file:///etc/passwd",
            f"http://u:p@{OUTSIDE}/",
            "http://[/",
            f"http://xn--a:{port}/",
            f"http:{INSIDE}:{port}/",
            f"\\\\{INSIDE}:{port}/",
        ):
            async with host(redirect_to(target)) as outside:
                assert isinstance(await fetched(fetcher(), outside.url), str), target


async def test_names_are_checked_again() -> None:
    async with host(answer_png) as target, host(redirect_to(f"http://b.org:{target.port}/")) as outside:
        names = Names({"a.org": [[OUTSIDE]], "b.org": [[OUTSIDE]]})
        by = fetcher(names, allowed_media_domains=("a.org",))
        why = await fetched(by, f"http://a.org:{outside.port}/")
        assert "'b.org' is not among the hosts of --allowed-media-domains" in str(why) and target.seen == []


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://a.org/", "only http and https URLs are fetched, got one of scheme 'ftp'"),
        ("gopher://a.org/", "only http and https"),
        ("http:///a", "http"),
        ("http://user:secret@a.org/", "user name or password"),
        ("http://user@a.org/", "user name or password"),
        ("http://[::1/", "is no URL"),
        ("http://a.org:99999/", "is no URL"),
        ("//a.org/", "only http and https"),
        ("http://no.such.name.invalid/", "cannot be fetched"),
    ],
)
async def test_other_urls_are_refused(url: str, why: str) -> None:
    said = str(await fetched(ImageFetcher(ImageFlags()), url))
    assert why in said and "secret" not in said


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with inside() as port:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://{INSIDE}:{port}")
        async with host(answer_png) as outside:
            assert await fetched(fetcher(), outside.url) == PNG


async def test_fetching_can_be_switched_off() -> None:
    async with host(answer_png) as outside:
        assert "--disable-image-fetch" in str(await fetched(fetcher(disable_image_fetch=True), outside.url))
        assert outside.seen == []


# ---- limits


async def test_redirects_end() -> None:
    async with host(redirect_to("/again")) as outside:
        why = await fetched(fetcher(), outside.url)
        assert f"more than {MAX_REDIRECTS} times" in str(why) and len(outside.seen) == MAX_REDIRECTS + 1


@pytest.mark.parametrize("says", [True, False])
async def test_a_long_file_is_refused(says: bool) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse()
        if says:
            out.content_length = 4 << 20
        await out.prepare(request)
        for _ in range(64):
            await out.write(b"x" * (1 << 16))
        return out

    async with host(answer) as outside:
        why = await fetched(fetcher(max_image_bytes=100_000), outside.url)
        assert "has more than 100000 bytes; send a smaller one" in str(why)


async def test_files_of_a_request_are_bounded_together() -> None:
    async with host(answer_png) as outside:
        urls = [f"{outside.url}/{i}" for i in range(3)]
        answers = list((await fetcher().fetch_all(urls, most_bytes=2 * len(PNG))).values())
        assert answers.count(PNG) == 2 and "together (--max-body-bytes)" in str(next(a for a in answers if a != PNG))


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + PNG,
        b"HTTP/1.1 302 Found\r\nLocation: /b\r\n",
    ],
)
async def test_a_host_that_stops_is_left(begun: bytes) -> None:
    async with raw_host(begun, then_waits=True) as outside:
        begun_s = time.monotonic()
        why = await fetched(fetcher(timeout_s=0.2), outside.url)
        assert "did not come within 0.2 s; " in str(why) and time.monotonic() - begun_s < 30


async def test_a_name_server_that_stops_is_left() -> None:
    class Silent(Names):
        async def resolve(self, *_: object, **__: object) -> list[object]:  # type: ignore[override]
            await asyncio.Event().wait()
            raise AssertionError

    why = await fetched(fetcher(Silent({}), timeout_s=0.1), "http://a.org/")
    assert "did not come within 0.1 s" in str(why)


@pytest.mark.parametrize(
    "answer",
    [
        b"not http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + PNG,
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(50_000)) + b"\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: \xff\xfe\r\n\r\n",
        b"HTTP/1.1 302 Found\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 999999 OK\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(b"0" * 1_000_000),
    ],
)
async def test_what_a_host_answers_wrongly_is_an_error_of_the_image(answer: bytes) -> None:
    async with raw_host(answer) as outside:
        assert isinstance(await fetched(fetcher(timeout_s=5.0), outside.url), str)


async def test_names_of_the_system_are_looked_up() -> None:
    """`localhost` is in every hosts file."""
    async with host(answer_png, INSIDE) as here:
        by = fetcher(networks=("127.0.0.0/8", "::1"))
        assert await fetched(by, f"http://localhost:{here.port}/") == PNG
