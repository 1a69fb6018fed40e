"""Fetches images by URL for untrusted clients, safe from SSRF (CWE-918).

    name allowed? -> resolve once -> check each address at its socket -> connect there
                                                       redirect: from the start

No cookies, credentials, proxies.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterable, Sequence
from functools import partial

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from service.images.bodies import BadImage
from service.images.hosts import AllowedHosts, ImageFlags

# ---- Name look-ups in daemon threads, so a hanging name server blocks nothing else.

LOOKUPS_AT_A_TIME = 64  # lookups, abandoned ones included

_Found = Sequence[tuple[int, int, int, str, tuple[object, ...]]]


class NameLookup(AbstractResolver):
    """The system's resolver without a cache."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(LOOKUPS_AT_A_TIME)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        await self._slots.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Found] = loop.create_future()

        def end(found: _Found | Exception) -> None:
            self._slots.release()
            if future.cancelled():
                return
            if isinstance(found, Exception):
                future.set_exception(found)
            else:
                future.set_result(found)

        def look_up() -> None:
            found = _look_up(host, port, family)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end, found)

        threading.Thread(target=look_up, name="image-name", daemon=True).start()
        return [_result(host, port, info) for info in await future]

    async def close(self) -> None:
        """Do nothing: sessions share this resolver."""


def _look_up(host: str, port: int, family: int) -> _Found | Exception:
    try:
        return socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return OSError(str(error))


def _result(host: str, port: int, info: tuple[int, int, int, str, tuple[object, ...]]) -> ResolveResult:
    family, _, protocol, _, address = info
    return ResolveResult(
        hostname=host, host=str(address[0]), port=port, family=family, proto=protocol, flags=socket.AI_NUMERICHOST
    )


# ---- fetch

MAX_REDIRECTS = 5
FETCH_TIMEOUT_S = 5.0  # with redirects
MAX_IMAGE_BYTES = 32 << 20  # per file
AT_A_TIME = 128  # concurrent fetches of a process
CHUNK_BYTES = 1 << 16
HEADERS = {"Accept": "image/*,*/*;q=0.1", "Accept-Encoding": "identity", "User-Agent": "tandem"}
_REDIRECTS = (301, 302, 303, 307, 308)
_REMEDY = "send the image as a data URL"

_AddressInfo = tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]


class ImageFetcher:
    """Fetches within `flags`. Raises ConfigError."""

    def __init__(
        self,
        flags: ImageFlags,
        *,
        resolver: AbstractResolver | None = None,
        timeout_s: float = FETCH_TIMEOUT_S,
        max_image_bytes: int = MAX_IMAGE_BYTES,
    ) -> None:
        self._flags = flags
        self._timeout_s = timeout_s
        self._max_image_bytes = max_image_bytes
        self._hosts = AllowedHosts(domains=flags.allowed_media_domains, networks=flags.allowed_media_networks)
        self._resolver = resolver or NameLookup()
        self._slots = asyncio.Semaphore(AT_A_TIME)

    async def fetch_all(self, urls: Iterable[str], *, most_bytes: int) -> dict[str, bytes | BadImage]:
        """Fetch each URL once, at most `most_bytes` in all."""
        unique = list(dict.fromkeys(urls))
        budget = _Budget(most_bytes)
        found = await asyncio.gather(*(self._fetch(url, budget) for url in unique), return_exceptions=True)
        answers: dict[str, bytes | BadImage] = {}
        for url, answer in zip(unique, found, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, BadImage):
                raise answer
            answers[url] = answer
        return answers

    async def _fetch(self, url: str, budget: "_Budget") -> bytes:
        if self._flags.disable_image_fetch:
            raise BadImage(f"this server fetches no images (--disable-image-fetch); {_REMEDY}")
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                return await self._follow(_read_url(url), budget)
        except TimeoutError:
            raise BadImage(f"did not come within {self._timeout_s:g} s; {_REMEDY}") from None

    async def _follow(self, url: URL, budget: "_Budget") -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            self._check(url)
            answer = await self._get(url, budget)
            if isinstance(answer, bytes):
                return answer
            url = _joined(url, answer)
        raise BadImage(f"redirects more than {MAX_REDIRECTS} times; give the address it ends at")

    def _check(self, url: URL) -> None:
        if url.scheme not in ("http", "https") or not url.raw_host:
            raise BadImage(f"only http and https URLs are fetched, got one of scheme {url.scheme[:20]!r}; {_REMEDY}")
        if url.user is not None or url.password is not None:
            raise BadImage(f"a URL with a user name or password is not fetched; {_REMEDY}")
        if (refusal := self._hosts.refusal_of_name(_name(url))) is not None:
            raise BadImage(f"{refusal}; {_REMEDY}")

    async def _get(self, url: URL, budget: "_Budget") -> bytes | str:
        """The file or redirect, in a session that reuses nothing."""
        refusals: list[str] = []
        connector = aiohttp.TCPConnector(
            force_close=True,
            use_dns_cache=False,
            resolver=self._resolver,
            socket_factory=partial(self._open_socket, url, refusals),
        )
        try:
            async with (
                aiohttp.ClientSession(
                    connector=connector,
                    cookie_jar=aiohttp.DummyCookieJar(),
                    auto_decompress=False,
                    trust_env=False,
                    headers=HEADERS,
                    timeout=aiohttp.ClientTimeout(total=None),  # set by the caller
                ) as session,
                session.get(url, allow_redirects=False) as response,
            ):
                return await self._read(response, budget)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, BadImage | TimeoutError):
                raise
            why = refusals[0] if refusals else f"cannot be fetched ({type(error).__name__})"
            raise BadImage(f"{why}; {_REMEDY}") from None

    def _open_socket(self, url: URL, refusals: list[str], info: _AddressInfo) -> socket.socket:
        family, kind, protocol, _, (address, port, *_) = info
        if (refusal := self._hosts.refusal_of_address(_name(url), address, port)) is not None:
            refusals.append(refusal)
            raise OSError(refusal)
        return socket.socket(family, kind, protocol)

    async def _read(self, response: aiohttp.ClientResponse, budget: "_Budget") -> bytes | str:
        if response.status in _REDIRECTS and "Location" in response.headers:
            return response.headers["Location"]
        if response.status != 200:
            raise BadImage(f"its host answered {response.status}; {_REMEDY}")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise BadImage(f"its host sent it compressed, although asked not to; {_REMEDY}")
        self._check_size(response.content_length or 0)
        data = bytearray()
        async for chunk in response.content.iter_chunked(CHUNK_BYTES):
            data += chunk
            self._check_size(len(data))
            budget.take(len(chunk))
        return bytes(data)

    def _check_size(self, size: int) -> None:
        if size > self._max_image_bytes:
            raise BadImage(f"has more than {self._max_image_bytes} bytes; send a smaller one")


class _Budget:
    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise BadImage(f"the images of this request have more than {self._most} bytes together (--max-body-bytes)")


def _read_url(text: str) -> URL:
    try:
        return URL(text)
    except ValueError as error:
        raise BadImage(f"is no URL ({str(error)[:80]})") from None


def _joined(url: URL, location: str) -> URL:
    try:
        return url.join(URL(location))
    except ValueError:
        raise BadImage(f"its host redirects to what is no URL; {_REMEDY}") from None


def _name(url: URL) -> str:
    return (url.raw_host or "").rstrip(".")
