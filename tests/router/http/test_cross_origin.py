"""A web page of another origin, in a real Chromium and by hand: what it may request and read, and that keys stay keys."""

import asyncio
import json
from typing import Any

import pytest

from tests.router.behaviours import pauses
from tests.router.dummies import STREAM, Cluster, cluster, workers
from tests.router.http.browser import Page, tab

PATH = "/v1/chat/completions"
HERE = "http://page.example"
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}


async def options(c: Cluster, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    async with c.client.options(c.url + path, headers=headers) as response:
        await response.read()
        return response.status, dict(response.headers)


async def test_preflights_need_no_key_and_requests_do() -> None:
    async with cluster(allowed_origins=(HERE,), api_key="k") as c:
        for path in (PATH, PATH + "/", "/workers", "/no/such/path"):
            status, told = await options(c, path, Origin=HERE, **ASKS)
            assert status == 204 and told["Access-Control-Allow-Origin"] == HERE, path
            assert told["Access-Control-Allow-Headers"] == ASKS["Access-Control-Request-Headers"]
        status, _, body = await c.post(PATH, STREAM, headers={"Origin": HERE})
        assert status == 401 and json.loads(body)["error"]["code"] == "invalid_api_key"
        for origin, want in (("http://evil.example", 403), ("null", 403), (c.url, 204)):  # the last needs no CORS
            status, told = await options(c, PATH, Origin=origin, **ASKS)
            assert status == want and "Access-Control-Allow-Origin" not in told, origin
        assert (await options(c, PATH, Origin=HERE))[0] == 401  # no question
        assert not c.decodes[0].seen


@pytest.mark.parametrize("path", [PATH, "/nowhere", "/workers", "/v1/models", "/health", "/dashboard"])
async def test_every_answer_tells_an_allowed_page_that_it_may_be_read(path: str) -> None:
    """Answers, errors, streams, files."""
    async with cluster(allowed_origins=(HERE,)) as c:
        for method in ("GET", "POST", "HEAD", "DELETE"):
            headers = {"Origin": HERE, "Content-Type": "application/json"}
            data = json.dumps(STREAM).encode() if method == "POST" else None
            async with c.client.request(method, c.url + path, data=data, headers=headers) as response:
                assert response.headers["Access-Control-Allow-Origin"] == HERE
                assert "Origin" in response.headers.getall("Vary")
                assert response.headers.getall("X-Request-Id") == [response.headers["X-Request-Id"]]
        assert "Access-Control-Allow-Origin" not in (await c.post(PATH, STREAM, headers={"Origin": c.url}))[1]


async def fetch(page: Page, url: str, body: dict[str, Any], **headers: str) -> Any:
    """What a script of the page reads: status, request id and pieces of the answer; a text when the browser refuses."""
    init = {"method": "POST", "headers": {"Content-Type": "application/json", **headers}, "body": json.dumps(body)}
    script = """(async () => {
      try {
        const answer = await fetch(%s, %s), pieces = [], reader = answer.body.getReader();
        for (let piece; !(piece = await reader.read()).done;) pieces.push(new TextDecoder().decode(piece.value));
        return [answer.status, answer.headers.get('X-Request-Id'), pieces.length, pieces.join('')];
      } catch (error) { return String(error); }
    })()"""
    return await page.js(script % (json.dumps(url), json.dumps(init)))


@pytest.mark.parametrize("allowed", ["page", "any", "none"])
async def test_a_web_client_of_another_origin(devtools: str, allowed: str) -> None:
    async with workers(1, mode="null") as (other,), tab(devtools) as page:
        origins = {"page": (other.url,), "any": ("*",), "none": ()}[allowed]
        seen = asyncio.Event()
        streams = pauses(seen, b"data: [DONE]\n\n")
        async with cluster(decode=[streams], allowed_origins=origins, api_key="k") as c:
            asyncio.get_running_loop().call_soon(seen.set)
            await page.open(other.url + "/v1/models")
            answer = await fetch(page, c.url + PATH, STREAM, Authorization="Bearer k")
            if allowed == "none":
                assert answer == "TypeError: Failed to fetch" and not c.decodes[0].seen
                return
            status, request_id, _, text = answer
            assert status == 200 and request_id and text == 'data: {"i": 0}\n\ndata: [DONE]\n\n'
            status, request_id, _, text = await fetch(page, c.url + PATH, STREAM)
            assert status == 401 and request_id and json.loads(text)["error"]["code"] == "invalid_api_key"
            assert len(c.decodes[0].seen) == 1
