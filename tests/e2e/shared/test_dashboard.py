"""The pages in front of real workers: what they report is on the dashboard, and a request's time line has its stages there and in a chat."""

import asyncio
from collections.abc import Iterator

import aiohttp
import pytest

from tests.e2e.cluster import Cluster
from tests.router.http.browser import chromium, tab

BODY = {
    "model": "default",
    "prompt": "k17 v42 k03 v91 " * 60,
    "max_tokens": 64,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}

pytestmark = pytest.mark.slow  # `make test` shows the pages what dummy workers report: tests/router/http


@pytest.fixture(scope="module")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with chromium(tmp_path_factory.mktemp("chromium")) as address:
        yield address


async def generate(session: aiohttp.ClientSession, url: str, request_id: str) -> None:
    headers = {"X-Request-Id": request_id}
    async with session.post(f"{url}/v1/completions", json=BODY, headers=headers) as response:
        assert response.status == 200 and (await response.read()).rstrip().endswith(b"data: [DONE]")


async def test_a_real_cluster_is_on_the_page(nixl: Cluster, devtools: str) -> None:
    async with tab(devtools) as page, aiohttp.ClientSession() as session:
        await page.open(nixl.router + "/dashboard")
        for role in ("prefill", "decode"):
            url = nixl.of(role)[0].url
            usage = f"document.querySelector('#{role} .card[data-url=\"{url}\"] .usage').innerText"
            await page.until(f"document.querySelector('#{role} .card') !== null && {usage}.startsWith('KV ')")
        shown = "[...document.querySelectorAll('.stages span')].filter((n) => n.checkVisibility())"
        names = f"{shown}.map((n) => n.textContent).join(' ')"
        assert await page.js(names) == "bootstrap waiting running inflight prealloc transfer running"
        # Until the workers' reports of it have come round: each figure is of the last minute.
        served = 0
        async with asyncio.timeout(MOVED_S):
            while not served or not await page.js(MOVED):  # tests before this one may have moved pages, but not these
                await generate(session, nixl.router, f"dash-{served}")
                served += 1
                await asyncio.sleep(0.05)
        await page.until("document.querySelector('#tile-ttft .figure').innerText.endsWith('s')")
        await page.until("document.querySelector('#tile-itl .figure').innerText.endsWith('s')")
        row = "[...document.querySelectorAll('.request')].find((n) => n.innerText.includes('dash-0'))"
        await page.until(f"{row} !== undefined")
        await page.js(f"{row}.querySelector('button').click()")
        lines = f"[...{row}.querySelectorAll('.timeline .inner')].map((n) => n.innerText.replace(/\\s+/g, ' '))"
        await page.until(f"{lines}.length >= 8")
        entries = await page.js(lines)
        for role, stages in (("prefill", ("bootstrap", "queue", "prefill", "transfer")), ("decode", ("decode",))):
            where = nixl.of(role)[0].url.removeprefix("http://")
            assert all(any(line.startswith(f"{stage} {where} ") for line in entries) for stage in stages), entries
        assert page.complaints == []
        assert all(url.startswith(nixl.router + "/") for url in page.asked)


async def test_a_chat_shows_the_stages_of_both_workers(nixl: Cluster, devtools: str) -> None:
    """What the chat page shows below an answer, from workers that really report it."""
    async with tab(devtools) as page:
        await page.open(nixl.router + "/chat")
        await page.until("document.getElementById('model').value === 'recall'")
        await page.type("k17 v42 k03 v91 k17")
        await page.press("Enter")
        last = "document.querySelector('.exchange:last-child')"
        await page.until(f"{last}?.querySelector('.answer .said').innerText.startsWith('v42')")
        await page.until(f"{last}.querySelector('.figures').innerText.includes('token')")
        await page.until(f"!{last}.querySelector('.crossed').hidden")
        lines = f"[...{last}.querySelectorAll('.timeline .inner')].map((n) => n.innerText.replace(/\\s+/g, ' '))"
        async with asyncio.timeout(MOVED_S):
            while (
                len(entries := await page.js(lines)) < 8
            ):  # the workers may report a little later: opened anew it asks again
                await page.js(f"{last}.querySelector('.crossed').click()")
                await asyncio.sleep(0.2)
        for role, stages in (("prefill", ("bootstrap", "queue", "prefill", "transfer")), ("decode", ("decode",))):
            where = nixl.of(role)[0].url.removeprefix("http://")
            assert where in await page.js(f"{last}.querySelector('.crossed').innerText")
            assert all(any(line.startswith(f"{stage} {where} ") for line in entries) for stage in stages), entries
        assert page.complaints == []


MOVED_S = 60.0
# Tokens came out, and KV went across.
MOVED = """['throughput', 'kv'].every((id) => {
  const figure = document.querySelector(`#tile-${id} .figure`);
  return figure !== null && figure.textContent !== '' && !/^0\\D/.test(figure.textContent);
})"""
