"""The pages that every server has, over HTTP and in a real Chromium: / and /docs, without anything from elsewhere."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from service.flags import installed_version
from tests.frontend.conftest import start_worker
from tests.router.dummies import cluster
from tests.router.http.browser import Page, tab

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def get(url: str, **headers: str) -> tuple[int, Any, Any]:
    async with aiohttp.ClientSession() as client, client.get(url, headers=headers) as response:
        kind = response.content_type
        return response.status, response.headers, await (response.json() if kind.endswith("json") else response.text())


@pytest.mark.parametrize("accept", ["application/json", "*/*", ""])
async def test_programs_get_json(accept: str) -> None:
    async with cluster(info={"model_path": "m<1>"}) as c:
        status, headers, told = await get(c.url, **{"Accept": accept})
        assert status == 200 and headers["Vary"] == "Accept"
        assert (told["name"], told["server"], told["version"]) == ("tandem", "router", installed_version())
        assert told["models"] == ["m<1>"] and {"/dashboard", "/docs", "/openapi.json"} <= set(told["links"])


async def test_model_names_need_a_key_and_markup_is_text() -> None:
    async with cluster(api_key="k", info={"model_path": "<script>m</script>"}) as c:
        assert "models" not in (await get(c.url))[2] and "models" not in (await get(c.url, Authorization="Bearer x"))[2]
        assert (await get(c.url, Authorization="Bearer k"))[2]["models"] == ["<script>m</script>"]
        assert "need a key" in (await get(c.url, **HTML))[2]
        status, headers, page = await get(c.url, Authorization="Bearer k", **HTML)
        assert status == 200 and "&lt;script&gt;m" in page and "<script>" not in page
        assert "default-src 'none'" in headers["Content-Security-Policy"]


async def look_around(page: Page, url: str, server: str, *, field: str) -> None:
    """Home, and from there to /docs; a route opens, and the filter finds those that have a field."""
    await page.open(url + "/")
    await page.until(f"document.getElementById('summary').textContent.startsWith('{server} ')")
    assert await page.js("document.querySelector('h1 img').complete")
    await page.js("document.querySelector('a[href=\"/docs\"]').click()")
    await page.until("document.querySelectorAll('#routes details').length > 20")
    await page.until("document.getElementById('summary').textContent.includes('routes')")
    row = "[...document.querySelectorAll('details')].find((d) => d.innerText.includes('/v1/chat/completions'))"
    await page.js(f"{row}.querySelector('summary').click()")
    await page.until(f"{row}.innerText.includes('messages')")
    await page.js(f"f = document.getElementById('filter'); f.value = '{field}'; f.dispatchEvent(new Event('input'))")
    left = await page.js("[...document.querySelectorAll('details:not([hidden]) code')].map((c) => c.textContent)")
    assert "/v1/chat/completions" in left and "/metrics" not in left and len(left) < 12
    assert page.complaints == [] and all(asked.startswith(url + "/") for asked in page.asked), page.asked
    assert "/favicon.ico" in {asked.removeprefix(url) for asked in page.asked}


async def test_a_person_looks_around_at_a_worker_and_at_a_router(devtools: str, tmp_path: Path) -> None:
    with start_worker(tmp_path, process=True) as worker:
        async with cluster(prefill=0, decode=0, unified=1) as c, tab(devtools) as page:
            await look_around(page, worker.url, "worker", field="max_completion_tokens")
            page.asked.clear()
            c.decodes[0].openapi = (await get(worker.url + "/openapi.json"))[2]
            await look_around(page, c.url, "router", field="max_completion_tokens")
            for width in (320, 1000):
                await page.resize(width, 800)
                assert await page.js("document.documentElement.scrollWidth <= innerWidth")
