"""Images by https: the host's certificate must be of a CA that the server trusts, and of that name. A server that trusts ours is a process of its own.

tls/ca.pem signs tls/host.pem (images.test, with its key, of no other use), from 2020 to 2120.
"""

import asyncio
import json
import os
import ssl
import sys
from pathlib import Path

import pytest

from service.images.bodies import BadImage
from tests.images.hosts import OUTSIDE, PNG, Names, answer_png, fetcher, host, redirect_to
from tests.packages import ROOT

CA, HOST = (Path(__file__).parent / "tls" / name for name in ("ca.pem", "host.pem"))
NAME, OTHER = "images.test", "other.test"  # both lead to the host; its certificate has the first
SCRIPT = "import asyncio, json, sys; from tests.images.test_tls import fetched; print(json.dumps(asyncio.run(fetched(sys.argv[1]))))"


async def fetched(url: str) -> str:
    """The file, or why there is none."""
    by = fetcher(Names({NAME: [[OUTSIDE]], OTHER: [[OUTSIDE]]}))
    (answer,) = (await by.fetch_all([url], most_bytes=1 << 20)).values()
    return str(answer) if isinstance(answer, BadImage) else answer.decode("latin-1")


async def fetched_by_process(url: str, *, ca: Path | None = CA) -> str:
    """As `fetched`, in a process that trusts `ca` beside nothing: SSL_CERT_FILE is OpenSSL's way to say so."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **({} if ca is None else {"SSL_CERT_FILE": str(ca)})}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SCRIPT, url), env=env, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    return str(json.loads(out))


def certified() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(HOST)
    return context


async def test_a_file_comes_from_a_host_whose_ca_is_trusted() -> None:
    async with host(answer_png, tls=certified()) as outside:
        assert await fetched_by_process(f"https://{NAME}:{outside.port}/a.png") == PNG.decode("latin-1")
        ((path, headers),) = outside.seen
    assert path == "/a.png" and headers["host"] == f"{NAME}:{outside.port}"


@pytest.mark.parametrize(("name", "ca"), [(OTHER, CA), (NAME, None)], ids=["of another name", "of an unknown CA"])
async def test_a_certificate_that_proves_nothing_is_refused(name: str, ca: Path | None) -> None:
    async with host(answer_png, tls=certified()) as outside:
        said = await fetched_by_process(f"https://{name}:{outside.port}/", ca=ca)
        assert said.startswith("cannot be fetched (ClientConnectorCertificateError)"), said
        assert not outside.seen


async def test_a_redirect_to_https_is_followed() -> None:
    async with (
        host(answer_png, tls=certified()) as inner,
        host(redirect_to(f"https://{NAME}:{inner.port}/b.png")) as outer,
    ):
        assert await fetched_by_process(f"http://{NAME}:{outer.port}/a.png") == PNG.decode("latin-1")
        assert [path for path, _ in inner.seen] == ["/b.png"]
