"""What somebody outside tries at real sockets: ways around the keys, addresses for servers to dial, ways out of a template."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from engine.frontend.routes import ADMIN_PATHS
from engine.text.chat_template import ChatTemplate, TemplateRefused
from service.security import keys
from service.security.keys import Access, Call, KeyRing, Signer, Verdict, Verifier, is_vouched, vouch
from tests.frontend.conftest import Worker, start_worker
from tests.hostile import means, table
from tests.hostile.doors import ask
from tests.router.dummies import cluster, until

SECRET = b"sixteen bytes or more"
# How a path may be written so that a guard and a router of requests could disagree about it.
DISGUISES = (
    *("{path}/", "/{path}", "/.{path}", "/health/..{path}", "{path}?x=/health", "{path}#/health", "{path};/health"),
    *("{path}%00", "{path}%20", "/%{first:x}{rest}", "http://127.0.0.1{path}"),
)


def disguised(path: str) -> list[str]:
    upper = path.upper()
    return [d.format(path=path, first=ord(path[1]), rest=path[2:]) for d in ("{path}", *DISGUISES)] + [upper]


def status_of(url: str, method: str, target: str, *, key: str = "") -> int:
    """Of a request whose target is sent as it is; 0 when the connection is closed instead."""
    headers = ((b"Authorization", b"Bearer " + key.encode()),) if key else ()
    return ask(url, table.Call(method.encode(), target.encode("latin-1"), b"{}", headers)).status


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    server = {"api_key": "user-key", "admin_api_key": "r00t-key"}
    with start_worker(tmp_path_factory.mktemp("guarded"), mode="decode", server=server, allowed=["10.0.0.0/8"]) as w:
        yield w


def test_no_spelling_of_a_worker_s_admin_route_needs_no_admin_key(guarded: Worker) -> None:
    for path in sorted(ADMIN_PATHS):
        for spelling in disguised(path):
            for method in ("GET", "POST", "PUT", "HEAD", "OPTIONS"):
                for key in ("", "user-key"):
                    status = status_of(guarded.url, method, spelling, key=key)
                    assert status >= 400 or status == 0, (method, spelling, key, status)
    assert status_of(guarded.url, "POST", "/flush_cache", key="r00t-key") == 200


async def test_nor_of_a_router_s() -> None:
    paths = (*sorted(ADMIN_PATHS - {"/check"}), "/workers")
    async with cluster(api_key="user-key", admin_api_key="r00t-key") as c:
        before = len(c.decodes[0].seen)
        for path in paths:
            for spelling in disguised(path):
                for key in ("", "user-key"):
                    status = await asyncio.to_thread(status_of, c.url, "POST", spelling, key=key)
                    assert status >= 400 or status == 0, (spelling, key, status)
        assert len(c.decodes[0].seen) == before


def luring(host: str, port: int) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, str]]:
    """(path, body) of requests, and headers, that name an address wherever one could."""
    url = f"http://{host}:{port}/x"
    named = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": 7, "bootstrap_pair_key": url}
    named |= {"prefill_url": url, "decode_url": url, "webhook": url, "callback_url": url, "worker": url, "rid": url}
    image = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "a"}]
    bodies = [
        ("/generate", {"text": "a", **named}),
        ("/generate", {"text": ["a", "b"], **named, "bootstrap_host": [host, host]}),
        ("/generate", {"text": "a", "image_data": url, "lora_path": url, **named}),
        ("/v1/completions", {"model": url, "prompt": "a", **named}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": image}], **named}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "model": url, **named}),
    ]
    away = f"{host}:{port}"
    names = "X-Prefiller-Host-Port X-Forwarded-Host X-Original-URL X-SMG-Target-Worker Forwarded Referer Host"
    return bodies, dict.fromkeys(names.split(), away)


def test_a_worker_dials_no_host_that_a_request_names(guarded: Worker) -> None:
    with means.trap("127.0.0.1") as port:
        bodies, headers = luring("127.0.0.1", port)
        for path, body in bodies:
            answer = guarded.post(path, body, headers={**headers, "Authorization": "Bearer user-key"})
            assert answer.status_code in (400, 404), (path, answer.text)
        assert status_of(guarded.url, "POST", f"http://127.0.0.1:{port}/generate", key="user-key") == 400
        assert status_of(guarded.url, "CONNECT", f"127.0.0.1:{port}") >= 400
        assert guarded.scheduler.num_running == 0


async def test_a_router_dials_no_host_that_a_request_names() -> None:
    with means.trap("127.0.0.1") as port:
        async with cluster() as c:
            bodies, headers = luring("127.0.0.1", port)
            for path, body in bodies:
                await c.post(path, body, headers=headers)
            assert await asyncio.to_thread(status_of, c.url, "CONNECT", f"127.0.0.1:{port}") >= 400
            for leg in (*c.prefills[0].seen, *c.decodes[0].seen):
                assert leg.headers["host"] != headers["Host"], "the client's Host went on to a worker"
                if "bootstrap_port" in leg.body:
                    assert str(port) not in json.dumps(leg.body["bootstrap_port"])
            await until(lambda: c.router.table.loads.num_leases == 0)


WAYS_OUT = (
    "''.__class__.__mro__[1].__subclasses__()",
    "messages.__class__.__mro__",
    "cycler.__init__.__globals__.os.listdir('/')",
    "raise_exception.__globals__",
    "self._TemplateReference__context.environment",
)


@pytest.mark.parametrize("way", WAYS_OUT)
def test_a_template_sees_no_classes(way: str) -> None:
    """A checkpoint's template runs in a sandbox: no way from a value to its class, nor to anything that opens files."""
    template = ChatTemplate("{{ " + way + " }}")
    with contextlib.suppress(TemplateRefused):
        assert template.render([{"role": "user", "content": "a"}]) == ""


def test_every_comparison_of_a_secret_goes_through_compare_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that says no, nothing is let in: there is no other way in, and no shorter one."""
    ring, server, signer, call = KeyRing(key="k"), Verifier(SECRET), Signer(SECRET), Call("PUT", "/route", b"")
    signer.challenge = server.challenge(0.0)
    header = signer.sign(call)[0]
    proof = server.sign_answer("n", status=200, body=b"")
    pass_on = vouch(SECRET, host="h", port=1, rooms=[1])
    assert ring.holder("Bearer k") and is_vouched(pass_on, SECRET, host="h", port=1, rooms=[1])
    assert signer.is_answer(proof, "n", status=200, body=b"")
    for module in (keys, keys, keys):
        monkeypatch.setattr(module.hmac, "compare_digest", lambda a, b: False)
    assert ring.holder("Bearer k") is None and not is_vouched(pass_on, SECRET, host="h", port=1, rooms=[1])
    assert server.verify(header, call, 0.0)[0] is not Verdict.GOOD
    assert not signer.is_answer(proof, "n", status=200, body=b"")
    assert keys.KeyGate(ring, KeyRing()).caller("Bearer k", 0.0).access is Access.NONE
