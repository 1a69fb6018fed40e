"""The dashboard over HTTP and in a real Chromium, in front of dummy workers."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from router.compose.routes import FILES
from tests.router.behaviours import hang, later, obey, resets
from tests.router.dummies import (
    CHAT,
    STREAM,
    Behaviour,
    Cluster,
    DummyWorker,
    always,
    answer_ok,
    begin_stream,
    cluster,
    until,
)
from tests.router.http.browser import AXE, Page, tab

PATH = "/v1/chat/completions"


def load(**told: Any) -> dict[str, Any]:
    """A worker's report; one that /get_load of the dummies gives."""
    core = {"num_running_reqs": 1, "num_used_tokens": 250, "max_total_num_tokens": 1000}
    return {"loads": [{**core, **told}]}


async def state_of(c: Cluster) -> Any:
    status, state = await c.get("/dashboard/state")
    assert status == 200
    return state


async def test_the_page_is_open_and_what_it_shows_is_not() -> None:
    async with cluster(api_key="user", admin_api_key="admin") as c:
        for path in FILES:
            async with c.client.get(c.url + path) as response:
                assert response.status == 200 and len(await response.read()) > 100
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert path != "/favicon.ico" or response.content_type == "image/svg+xml"
                policy = response.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        for path in ("/dashboard/state", "/dashboard/snapshot", "/dashboard/requests/0-1"):
            for key, status in ((None, 401), ("user", 403), ("wrong", 401), ("admin", 200)):
                headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                unknown = status == 200 and path.endswith("0-1")
                assert (await c.get(path, **headers))[0] == (404 if unknown else status), (path, key)


async def test_a_request_is_shown_with_its_workers_and_times() -> None:
    async with cluster(decode=2) as c:
        c.prefills[0].load = load(disaggregation={"prefill_inflight_queue_reqs": 2})
        bad, good = c.decodes
        bad.behave = always(500, {"error": {"message": "no memory"}})
        status, _, _ = await c.post(PATH, STREAM, headers={"X-Request-Id": "mine"})
        assert status == 200
        await c.settled()
        await until(lambda: c.router.table.workers()[0].report)
        state = await state_of(c)
        (record,) = state["requests"]
        failed, served = record["attempts"]
        assert failed["answering"] == bad.url and "500" in failed["failure"] and failed["failed_s"]
        assert served["answering"] == good.url and served["prefill"] == c.prefills[0].url
        assert record["request_id"] == "mine" and record["status"] == 200 and record["num_events"] >= 1
        marks = [record["started_s"], failed["started_s"], failed["failed_s"], served["started_s"]]
        marks += [record["first_byte_s"], record["last_byte_s"], record["ended_s"], state["now_s"]]
        assert marks == sorted(marks)
        prefill, *_ = state["workers"]
        assert prefill["report"]["stages"] == {"inflight": 2, "running": 1} and prefill["health"] == "up"
        assert (await c.get(f"/dashboard/requests/{record['key']}"))[1]["record"] == record


async def test_one_that_runs_is_shown_and_one_whose_stream_broke_is_a_failure() -> None:
    async with cluster() as c:
        cut = asyncio.Event()

        async def break_off(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await begin_stream(request)
            await cut.wait()
            return await resets(worker, request, body)

        c.decodes[0].behave = break_off
        ask = asyncio.create_task(c.post(PATH, STREAM))
        async with asyncio.timeout(10):
            while not (shown := (await state_of(c))["requests"]) or shown[0]["first_byte_s"] is None:
                await asyncio.sleep(0.005)
        assert shown[0]["status"] == 0 and shown[0]["ended_s"] is None
        assert (await state_of(c))["router"]["running"] == 1
        cut.set()
        await ask
        await c.settled()
        (record,) = (await state_of(c))["requests"]
        assert record["status"] == 200 and "broke off" in record["failure"]
        seconds = c.router.recorder.snapshot().seconds
        assert sum(s.failed for s in seconds) == 1
        assert [s.failures for s in seconds if s.failures] == [{"decode lost": 1}]


@asynccontextmanager
async def shown(devtools: str, **flags: Any) -> AsyncIterator[tuple[Cluster, Page]]:
    """A cluster, and a page that shows it; nothing may come from elsewhere."""
    async with cluster(prefill=2, decode=2, **flags) as c, tab(devtools) as page:
        await page.open(c.url + "/dashboard")
        yield c, page
        assert page.asked and all(url.startswith(c.url + "/") for url in page.asked), page.asked


def rows(page: Page, condition: str) -> Any:
    return page.until(f"document.querySelectorAll('.request').length {condition}")


def card(worker: DummyWorker) -> str:
    return f"document.querySelector('.card[data-url=\"{worker.url}\"]')"


async def test_it_follows_traffic_and_survives_a_dead_worker(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        c.prefills[0].load = load(disaggregation={"prefill_inflight_queue_reqs": 2})
        await page.until("document.querySelectorAll('#prefill .card').length === 2")
        await page.until("document.querySelectorAll('#decode .card').length === 2")
        await page.until("document.getElementById('rows').innerText.includes('No request')")
        await page.until(f"{card(c.prefills[0])}.innerText.includes('KV 25%')")
        await page.until(f"{card(c.prefills[0])}.innerText.includes('1 running · 2 inflight')")
        await page.until("document.querySelector('#prefill [data-stage=inflight] b').textContent === '2'")
        assert "tokens a step" not in await page.js("document.getElementById('tile-throughput').innerText")
        c.decodes[0].load = load(speculative={"accept_length": 2.5})
        await page.until("document.getElementById('tile-throughput').innerText.includes('2.50 tokens a step')")
        c.prefills[0].info = {"tp_size": 2, "dp_size": 3, "pp_size": "x", "rank_pids": [11, 12, "y"]}
        c.prefills[0].incarnation = "of several ranks"
        await page.until(f"{card(c.prefills[0])}.querySelector('.sizes').innerText === 'TP 2 · DP 3'")
        assert "ranks: pid 11, 12" in await page.js(f"{card(c.prefills[0])}.title")
        assert await page.js(f"{card(c.prefills[1])}.querySelector('.sizes').innerText") == ""
        links = await page.js("document.querySelectorAll('#links path').length")
        assert links == 2 + 4 + 2  # to each prefill worker, from each to each decode worker, and out
        for _ in range(3):
            assert (await c.post(PATH, STREAM))[0] == 200
        await rows(page, "=== 3")
        await page.until("document.querySelectorAll('#flow .dot').length > 0")
        dead, alive = c.decodes
        await dead.stop()
        await page.until(f"{card(dead)}.dataset.health === 'down'")
        await page.until("document.getElementById('summary').innerText.includes('1 down')")
        for _ in range(3):
            assert (await c.post(PATH, STREAM))[0] == 200
        await rows(page, "=== 6")
        assert await page.js(f"{card(alive)}.dataset.health") == "up"
        await dead.start()
        await page.until(f"{card(dead)}.dataset.health === 'up'")
        assert page.complaints == []


async def test_a_worker_that_changes_its_role_shows_so_and_why(devtools: str) -> None:
    """Decode is full and prefill idle: the router moves a worker, which takes its time."""
    may_go = asyncio.Event()
    flags = {"auto_roles_interval_s": 0.02, "auto_roles_sustain_s": 0.1, "auto_roles_switch_time_s": 0.0}
    async with shown(devtools, auto_roles=True, **flags) as (c, page):
        for worker in (*c.prefills, *c.decodes):
            worker.behave, worker.incarnation = later(may_go, obey), "a"
            used = 950 if worker in c.decodes else 0
            worker.load = load(num_used_tokens=used, totals={"busy_ms": 0, "prompt_tokens": 0})
        mover = c.prefills[0]
        await page.until(f"{card(mover)}?.dataset.health === 'switching'")
        assert "→ decode" in await page.js(f"{card(mover)}.innerText")
        assert await page.js(f"{card(mover)}.closest('.lane').id") == "prefill"
        await page.until("document.getElementById('summary').innerText.includes('1 changing role')")
        move = f"document.querySelector('#roles .move[data-url=\"{mover.url}\"]')"
        await page.until(f"{move}?.dataset.result === ''")
        assert "decode is short" in await page.js(f"{move}.innerText")
        assert await page.js("document.querySelector('#roles .decode b').textContent") == "0.95"
        may_go.set()
        await page.until(f"{card(mover)}.closest('.lane').id === 'decode'")
        await page.until(f"{move}.dataset.result === 'moved'")
        await page.until("document.querySelector('#roles .verdict').innerText === 'neither pool is short'")
        assert "changing" not in await page.js("document.getElementById('summary').innerText")
        assert await page.js("document.documentElement.scrollWidth <= innerWidth")
        assert page.complaints == []


async def test_encoder_workers_have_a_row_of_their_own_where_there_are_any(devtools: str) -> None:
    async with shown(devtools, encode=1) as (c, page):
        encoder = c.encoders[0]
        await page.until("document.querySelectorAll('#encode .card').length === 1")
        encoder.load = load(num_waiting_reqs=3, num_waiting_uncached_tokens=900)
        await page.until(f"{card(encoder)}.innerText.includes('features 25%')")
        await page.until(f"{card(encoder)}.innerText.includes('3 waiting · 1 running')")
        top = "document.getElementById('{}').getBoundingClientRect().{}"
        below = f"{top.format('encode', 'top')} >= {top.format('prefill', 'bottom')}"
        assert await page.js(below) and await page.js("document.documentElement.scrollWidth <= innerWidth")
        await encoder.stop()
        await page.until(f"{card(encoder)}.dataset.health === 'down'")
        assert await c.remove(encoder) == 200
        await page.until("getComputedStyle(document.getElementById('encode')).display === 'none'")
        assert page.complaints == []


def of_rank(dp_rank: int, **attributes: Any) -> Behaviour:
    """Answers, and has times of a DP rank for any request, and `attributes`."""

    async def behave(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path != "/traces":
            return await answer_ok(worker, request, body)
        now_s = time.time()
        record = {"request_id": body["ids"][0], "process": worker.mode, "operation": "chat", "start_s": now_s}
        span = {"name": "transfer_queue", "start_s": now_s, "end_s": now_s + 0.1}
        rest = {"end_s": now_s + 1, "attributes": {"tandem.dp_rank": dp_rank, **attributes}, "spans": [span]}
        return web.json_response({"records": [{**record, **rest}]})

    return behave


async def test_a_click_opens_the_time_line(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        c.decodes[0].behave = always(500, {"error": {"message": "no memory"}})
        c.decodes[1].behave = of_rank(7)
        while not c.decodes[0].seen:
            assert (await c.post(PATH, STREAM))[0] == 200
        tried = next(r for r in (await state_of(c))["requests"] if len(r["attempts"]) == 2)
        row = f"document.querySelector('.request[data-key=\"{tried['key']}\"]')"
        await page.until(f"{row} !== null")
        await page.js(f"{row}.querySelector('button').click()")
        await page.until(f"{row}.querySelectorAll('.timeline .line').length >= 5")
        await page.until(f"{row}.querySelector('.line.inner .where')?.innerText.endsWith(' DP 7')")
        inner = await page.js(f"{row}.querySelector('.line.inner').innerText")
        assert " ".join(inner.split()).startswith("transfer queue " + c.decodes[1].url.removeprefix("http://"))
        text = await page.js(f"{row}.querySelector('.detail').innerText")
        assert "first token (try 2)" in text and "HTTP 500" in text and tried["request_id"] in text
        assert await page.js(f"{row}.querySelectorAll('.timeline .span.bad').length") == 2
        await page.until("!document.getElementById('held').hidden")
        before = await page.js("document.querySelectorAll('.request').length")
        await c.post(PATH, STREAM)
        asked = len(page.asked)
        await until(lambda: len(page.asked) > asked + 2)  # it has seen the new one, and pushes nothing aside for it
        assert await page.js("document.querySelectorAll('.request').length") == before
        await page.js(f"{row}.querySelector('button').click()")
        assert await page.js(f"{row}.querySelector('.detail').hidden")
        await rows(page, f"=== {before + 1}")


async def test_a_row_names_its_workers_model_and_tokens(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        c.prefills[0].behave = c.prefills[1].behave = of_rank(0, **usage(input=1234, cached=1000))
        c.decodes[0].behave = c.decodes[1].behave = of_rank(0, **usage(input=1234, output=56))
        await c.post(PATH, {**STREAM, "model": "poems", "messages": [{"role": "user", "content": "word " * 400}]})
        await rows(page, "=== 1")
        heads = await page.js("[...document.querySelectorAll('.heads > *')].map((n) => n.innerText)")
        assert heads == HEADS
        pair = [next(w for w in pool if w.seen).url.removeprefix("http://") for pool in (c.prefills, c.decodes)]
        assert await page.js("document.querySelector('.request .workers').innerText") == " → ".join(pair)
        assert (await page.js("document.querySelector('.request .tokens').innerText")).startswith("~")
        await page.js("document.querySelector('.request button').click()")
        await page.until("document.querySelector('.request .tokens').innerText === '1,234'")
        assert await page.js("document.querySelector('.request .out').innerText") == "56"
        facts = await page.js("document.querySelector('.facts').innerText")
        assert (
            "poems" in facts and "1,234 tokens, 1,000 of them from the prefix cache" in facts and "56 tokens" in facts
        )
        assert page.complaints == []


HEADS = ["Time", "Request", "API", "Status", "First token", "Total", "In", "Out", "Workers", "Time line"]


def usage(**tokens: int) -> dict[str, int]:
    names = {"input": "input_tokens", "output": "output_tokens", "cached": "cache_read.input_tokens"}
    return {f"gen_ai.usage.{names[name]}": count for name, count in tokens.items()}


async def test_models_and_cache_hits_are_shown(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        prompts = 0

        def count_up() -> None:
            nonlocal prompts
            prompts += 100
            c.prefills[0].load = load(totals={"prompt_tokens": prompts, "cached_tokens": prompts * 3 // 4})

        for worker in (*c.prefills, *c.decodes):
            worker.info, worker.incarnation = {"served_model_name": "smollm2"}, "a"
        summary = "document.getElementById('summary').innerText"
        await page.until(f"{summary}.startsWith('smollm2 · ')")
        assert await page.js("[...document.querySelectorAll('.model')].map((n) => n.innerText).join('')") == ""
        count_up()
        await page.until(f"{card(c.prefills[0])}.innerText.includes('cache hits 75%')")
        count_up()
        await page.until("document.querySelector('#tile-cache .figure').innerText === '75%'")
        assert "cache hits" not in await page.js(f"{card(c.prefills[1])}.innerText")
        c.decodes[1].info, c.decodes[1].incarnation = {"served_model_name": "qwen"}, "b"
        await page.until(f"{card(c.decodes[1])}.querySelector('.model').innerText === 'qwen'")
        assert (await page.js(summary)).startswith("2 models · ")


async def test_charts_have_a_time_axis_and_their_highest_value(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        assert (await c.post(PATH, STREAM))[0] == 200
        peak = "document.querySelector('#tile-requests .peak').innerText"
        await page.until(f"{peak} === 'highest 1 a second'")
        axes = await page.js(
            "[...document.querySelectorAll('.times')].map((n) => n.innerText.split(/\\s{2,}|\\n/).join('|'))"
        )
        assert len(axes) == 8 and set(axes) == {"2 min ago|1 min|now"}
        assert await page.js("document.querySelector('#tile-failures .peak').innerText") == ""


async def test_names_of_stages_explain_themselves(devtools: str) -> None:
    """By pointer and by key; Escape hides it, and so does leaving."""
    async with shown(devtools) as (_, page):
        await page.call("Emulation.setFocusEmulationEnabled", enabled=True)
        await page.until("document.querySelectorAll('.card').length === 4")
        word, tip = "document.querySelector('#decode [data-stage=prealloc] .term')", "document.getElementById('tip')"
        await page.js(f"{word}.focus()")
        assert await page.js(f"{tip}.innerText") == "Waiting for free KV memory on the decode worker."
        assert await page.js(f"{word}.getAttribute('aria-describedby') === 'tip' && !{tip}.hidden")
        await page.press("Escape")
        assert await page.js(f"{tip}.hidden && !{word}.hasAttribute('aria-describedby')")
        await page.js(f"{word}.blur()")
        x, y = await page.js(
            f"(({{ x, y, width, height }}) => [x + width / 2, y + height / 2])({word}.getBoundingClientRect())"
        )
        await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        await page.until(f"!{tip}.hidden")
        await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y + 20)  # onto the explanation itself
        assert not await page.js(f"{tip}.hidden")
        await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        await page.until(f"{tip}.hidden")
        unexplained = "[...document.querySelectorAll('.stages li')].filter((n) => !n.querySelector('.term'))"
        assert await page.js(f"{unexplained}.length") == 0


async def test_axe_finds_nothing_to_mend(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        await page.js(AXE + "; true")
        await page.until("document.querySelectorAll('.card').length === 4")
        assert await page.violations() == []
        c.decodes[0].behave = always(500, {"error": {"message": "no memory"}})
        while not c.decodes[0].seen:
            await c.post(PATH, STREAM)
        await page.until("document.querySelector('.request') !== null")
        await page.js(
            "document.querySelector('.request button').click(), document.querySelector('.heads .term').click()"
        )
        await page.until(
            "document.querySelectorAll('.timeline .line').length > 0 && !document.getElementById('tip').hidden"
        )
        assert await page.violations() == []


async def test_a_page_of_another_site_commands_nothing(devtools: str) -> None:
    """What a browser sends for a page without asking first: text, nothing, an image's address."""
    async with cluster() as c, tab(devtools) as page:
        await page.open(c.decodes[0].url + "/v1/models")
        for path, body in (("/workers", {"url": "http://127.0.0.1:9", "role": "decode"}), ("/flush_cache", None)):
            init = {"method": "POST", "mode": "no-cors", **({} if body is None else {"body": json.dumps(body)})}
            await page.js(f"fetch('{c.url}{path}', {json.dumps(init)}).then(() => true)")
        image = f"i = new Image(); i.onload = i.onerror = done; i.src = '{c.url}/flush_cache'"
        await page.js(f"new Promise(done => {{ const {image}; }})")
        asked = [url.removeprefix(c.url) for url in page.asked if url.startswith(c.url)]
        assert asked == ["/workers", "/flush_cache", "/flush_cache"]
        assert len(c.router.table.workers()) == 2
        assert all(path != "/flush_cache" for worker in (*c.prefills, *c.decodes) for path, _ in worker.calls)


async def test_what_others_write_is_text(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        markup = "<img src=x onerror=alert(1)><script>alert(2)</script>"
        c.decodes[0].behave = c.decodes[1].behave = always(400, {"error": {"message": markup}})
        await c.post(PATH, CHAT, headers={"X-Request-Id": markup})
        await rows(page, "=== 1")
        await page.js("document.querySelector('.row').click()")
        await page.until("document.querySelector('.detail').innerText.includes('onerror')")
        assert await page.js("document.querySelectorAll('main img, main script').length") == 0


async def test_it_is_light_and_dark(devtools: str) -> None:
    async with shown(devtools) as (_, page):
        await page.until("document.querySelectorAll('.card').length === 4")

        async def lightness() -> int:
            grounds = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3)"
            return int(await page.js(f"{grounds}.reduce((sum, v) => sum + Number(v), 0)"))

        async def contrast() -> float:
            """Of text on the ground, as WCAG has it."""
            return float(await page.js(CONTRAST))

        await page.prefer(prefers_color_scheme="light")
        assert await lightness() > 700 and await contrast() > 4.5
        await page.prefer(prefers_color_scheme="dark")
        assert await lightness() < 100 and await contrast() > 4.5
        await page.js("document.getElementById('theme').click()")  # from "auto" to "light"
        assert await lightness() > 700
        await page.js("document.getElementById('theme').click()")
        await page.prefer(prefers_color_scheme="light")
        assert await lightness() < 100
        await page.js("document.getElementById('theme').click()")
        assert page.complaints == []


CONTRAST = """(() => {
  const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const notes = [document.body, document.querySelector('.note'), document.querySelector('h2')];
  const ground = light(getComputedStyle(document.body).backgroundColor);
  return Math.min(...notes.map((node) => light(getComputedStyle(node).color))
    .map((ink) => (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05)));
})()"""


async def test_no_width_scrolls_sideways(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        c.decodes[0].behave = c.decodes[1].behave = hang
        ask = asyncio.create_task(c.post(PATH, CHAT, headers={"X-Request-Id": "very-long-" * 12}))
        await rows(page, "=== 1")
        await page.js("document.querySelector('.row').click()")
        await page.until("document.querySelectorAll('.timeline .line').length >= 3")
        assert await page.too_wide(but="svg") == []  # nor is anything cut off
        ask.cancel()
        await asyncio.gather(ask, return_exceptions=True)


async def test_it_asks_for_a_key_and_keeps_it_in_the_tab(devtools: str) -> None:
    async with shown(devtools, api_key="user") as (c, page):

        async def give(key: str) -> None:
            await page.until("document.getElementById('key').open")
            await page.js(f"document.getElementById('key-input').value = {json.dumps(key)}")
            await page.js("document.getElementById('key-send').click()")

        await give("wrong")
        await page.until("document.getElementById('key-why').innerText.includes('missing or wrong')")
        assert await page.js("document.querySelector('main').hidden")
        await give("user")
        await page.until("document.querySelectorAll('.card').length === 4")
        await page.open(c.url + "/dashboard")  # loaded anew: it is not asked again
        await page.until("document.querySelectorAll('.card').length === 4")
        assert not await page.js("document.getElementById('key').open")
        assert await page.js("Object.keys(localStorage).join()") == "tandem-theme"
        assert all("401" in complaint for complaint in page.complaints)  # Chromium's own word for each refusal


async def test_a_router_that_goes_away_is_said_and_its_return_too(devtools: str) -> None:
    async with tab(devtools) as page:
        async with cluster() as c:
            port = int(c.url.rpartition(":")[2])
            await page.open(c.url + "/dashboard")
            await page.until("document.querySelectorAll('.card').length === 2")
        await page.until("document.body.classList.contains('stale')")
        assert "no answer" in await page.js("document.getElementById('summary').innerText")
        assert await page.js("document.querySelectorAll('.card').length") == 2  # the last picture stays
        async with cluster(port=port, decode=2):
            await page.until("document.querySelectorAll('.card').length === 3")
            assert not await page.js("document.body.classList.contains('stale')")


async def test_a_plain_router_shows_one_lane(devtools: str) -> None:
    async with cluster(unified=2) as c, tab(devtools) as page:
        c.decodes[0].load = load()
        await page.open(c.url + "/dashboard")
        await page.until("document.querySelectorAll('#decode .card').length === 2")
        assert await page.js("document.querySelector('#decode h2').textContent") == "Workers"
        assert await page.js("document.getElementById('prefill').offsetParent") is None
        c.decodes[0].behave = c.decodes[1].behave = answer_ok
        assert (await c.post(PATH, STREAM))[0] == 200
        await rows(page, "=== 1")
        assert page.complaints == []
