"""The chat page in a real Chromium, in front of dummy workers that speak as a model does."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.frontend.conftest import start_worker
from tests.router.behaviours import resets
from tests.router.dummies import Behaviour, Cluster, DummyWorker, always, cluster, stream, until
from tests.router.http.browser import AXE, Page, tab

EXCHANGES = "[...document.querySelectorAll('.exchange')]"
LAST = "document.querySelector('.exchange:last-child')"
DONE = f"{LAST}?.querySelector('.answer').getAttribute('aria-busy') === 'false'"
ANSWER = f"{LAST}.querySelector('.answer .said').innerText"
QUESTION = "What is the capital of France?"
RICH = """The capital is **Paris**, on the *Seine*:

1. big
2. `old`

```python
print("Bonjour, a long line of code that is wider than a phone, and wider than that")
```
## More
> said one"""
CODE = """```python
# Say it.
def say(name: str = "<b>Paris</b>") -> int:
    return 42
```

```brainscript
return "plain"
```"""
SEEING = {"id": "sees", "parent": None, "max_model_len": 8192, "has_image_understanding": True}
BLIND = {"id": "blind", "parent": None, "max_model_len": 600, "has_image_understanding": False}

THUMBS = "document.querySelectorAll('#attached canvas').length"
# A file of one colour, given as by the button, a paste or a drop; photographs need as many bytes as noise does.
GIVE = """(async (how, name, type, width, height, noise) => {
  const canvas = new OffscreenCanvas(width, height), on = canvas.getContext("2d");
  const pixels = on.createImageData(width, height);
  for (let i = 0; i < pixels.data.length; i++) pixels.data[i] = i % 4 === 3 ? 255 : noise ? Math.random() * 256 : 90;
  on.putImageData(pixels, 0, 0);
  const data = new DataTransfer();
  const content = type.startsWith("image/") ? await canvas.convertToBlob({ type }) : "words";
  data.items.add(new File([content], name, { type }));
  const files = document.getElementById("files");
  if (how === "button") { files.files = data.files; files.dispatchEvent(new Event("change")); }
  else if (how === "paste") document.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, cancelable: true }));
  else document.dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true }));
})"""


def event(text: str = "", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}], **more}


def says(text: str, *, hold: asyncio.Event | None = None) -> Behaviour:
    """Streams the words of `text`; with `hold` the first alone, until it is set. Tells its time line, too."""

    async def behave(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path == "/traces":
            return web.json_response({"records": [part_of(worker, body["ids"][0])]})
        first, *others = text.split(" ")
        words = [first, *(" " + word for word in others)]
        usage = {"prompt_tokens": 7, "completion_tokens": len(words)}
        events = [*map(event, words), {"choices": [], "usage": usage}]
        if hold is None:
            return await stream(request, events)
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for i, each in enumerate(events):
            if i == 1:
                await hold.wait()
            await out.write(b"data: " + json.dumps(each).encode() + b"\n\n")
        await out.write(b"data: [DONE]\n\n")
        return out

    return behave


def part_of(worker: DummyWorker, request_id: str) -> dict[str, Any]:
    now_s = time.time()
    span = {"name": f"{worker.mode}_stage", "start_s": now_s, "end_s": now_s + 0.5}
    times = {"start_s": now_s, "end_s": now_s + 1, "spans": [span]}
    return {"request_id": request_id, "process": worker.mode, "operation": "chat", **times}


@asynccontextmanager
async def shown(
    devtools: str, *, ready: bool = True, models: list[dict[str, Any]] | None = None, **flags: Any
) -> AsyncIterator[tuple[Cluster, Page]]:
    """A cluster of two pairs, and its chat page; nothing may come from elsewhere."""
    async with cluster(prefill=2, decode=2, **flags) as c, tab(devtools) as page:
        answer_with(c, says("It is Paris."))
        for worker in (*c.prefills, *c.decodes):
            worker.models = models
        await page.call("Storage.clearDataForOrigin", origin=c.url, storageTypes="local_storage")
        await reload(c, page, ready=ready)
        yield c, page
        assert page.asked and all(url.startswith(c.url + "/") for url in page.asked), page.asked


async def reload(c: Cluster, page: Page, *, ready: bool = True) -> None:
    await page.open(c.url + "/chat")
    if ready:
        await page.until("document.getElementById('model').value !== ''")


def answer_with(c: Cluster, behave: Behaviour) -> None:
    c.behave(behave)


def bodies(c: Cluster) -> list[dict[str, Any]]:
    """Of the chats that decode workers received."""
    return [s.body for worker in c.decodes for s in worker.seen if s.path == "/v1/chat/completions"]


async def ask(page: Page, question: str = QUESTION, *, then: str = DONE) -> None:
    before = await page.js(f"{EXCHANGES}.length")
    await page.js("document.getElementById('message').focus()")
    await page.type(question)
    await page.press("Enter")
    await page.until(f"{EXCHANGES}.length === {before + 1} && {then}")


async def focused(page: Page) -> str:
    return str(
        await page.js("document.activeElement.id || document.activeElement.innerText || document.activeElement.tagName")
    )


async def set_field(page: Page, name: str, value: str) -> None:
    change = "node.dispatchEvent(new Event('input', {bubbles: true}))"
    await page.js(f"{{ const node = document.getElementById('{name}'); node.value = {json.dumps(value)}; {change}; }}")


async def give(page: Page, how: str, name: str, *, type: str = "image/png", side: int = 8, noise: bool = False) -> None:
    values = ", ".join(map(json.dumps, (how, name, type, side, side, noise)))
    await page.js(f"{GIVE}({values})")


async def test_a_conversation_by_keyboard_alone(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        assert await focused(page) == "message"
        await page.type("one")
        await page.press("Enter", shift=True)
        await page.type("two")
        assert await page.js(f"{EXCHANGES}.length") == 0  # a new line is not sent
        await page.press("Enter")
        await page.until(DONE)
        assert await page.js(ANSWER) == "It is Paris."
        assert await focused(page) == "message" and await page.js("document.activeElement.value") == ""
        await ask(page, "And of Spain?")
        first, second = sorted(bodies(c), key=lambda body: len(body["messages"]))
        assert first["messages"] == [{"role": "user", "content": "one\ntwo"}] and first["stream"] is True
        assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"]
        assert second["messages"][1]["content"].strip() == "It is Paris."
        assert page.complaints == []


async def test_the_order_of_the_focus_is_that_of_the_page(devtools: str) -> None:
    async with shown(devtools) as (_, page):
        await ask(page)
        await page.until(f"!{LAST}.querySelector('.crossed').hidden")
        order = [await focused(page)]
        for _ in range(11):
            await page.press("Tab")
            order.append((await focused(page)).split("\n")[0].split(" ")[0])
        assert order[:2] == ["message", "send"]  # then the window, whose page it is
        assert order[3:] == ["Dashboard", "new", "theme", "Settings", "Edit", "Time", "Copy", "Again", "message"]


@pytest.mark.parametrize("by", ["Escape", "button"])
async def test_a_stop_takes_the_request_from_the_workers(devtools: str, by: str) -> None:
    async with shown(devtools) as (c, page):
        hold = asyncio.Event()
        answer_with(c, says("Paris is big", hold=hold))
        await ask(page, then=f"{ANSWER}.includes('Paris')")
        assert await page.js("document.getElementById('send').innerText") == "Stop"
        await (page.press(by) if by == "Escape" else page.js("document.getElementById('send').click()"))
        await page.until(DONE)
        await until(lambda: sum(worker.cancelled for worker in c.decodes) == 1)
        await c.settled()
        assert await page.js(ANSWER) == "Paris"
        assert "stopped" in await page.js(f"{LAST}.querySelector('.meta').innerText")
        assert await page.js("document.getElementById('announcer').textContent") == "Stopped. Answer so far: Paris"
        answer_with(c, says("Madrid."))
        await ask(page, "And of Spain?")  # the conversation goes on, with what had come
        assert [m["content"].strip() for m in bodies(c)[-1]["messages"]] == [QUESTION, "Paris", "And of Spain?"]


async def test_an_answer_is_made_again_and_a_question_is_edited(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        await ask(page, "first")
        await ask(page, "second")
        answer_with(c, says("Another one."))
        await page.js(f"{LAST}.querySelector('.again').click()")
        await page.until(f"{DONE} && {ANSWER} === 'Another one.'")
        assert await page.js(f"{EXCHANGES}.length") == 2
        again = bodies(c)[-1] if bodies(c)[-1]["messages"][-1]["content"] == "second" else bodies(c)[0]
        assert [m["content"].strip() for m in again["messages"]] == ["first", "It is Paris.", "second"]
        edit = f"{EXCHANGES}[0].querySelector('.question button').click()"
        await page.js(edit)
        assert await page.js("document.getElementById('message').value") == "first"
        assert await page.js("document.querySelectorAll('.dropped').length") == 2
        await page.press("Escape")  # nothing has changed
        assert await page.js("document.querySelectorAll('.dropped').length") == 0
        assert await page.js(f"{EXCHANGES}.length") == 2
        await page.js(edit)
        await page.type(", but better")
        await page.press("Enter")
        await page.until(f"{EXCHANGES}.length === 1 && {DONE}")
        assert await page.js(f"{LAST}.querySelector('.question .said').innerText") == "first, but better"


async def test_a_new_chat_forgets_and_ends_what_runs(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        answer_with(c, says("Paris is big", hold=asyncio.Event()))
        await ask(page, then=f"{ANSWER}.includes('Paris')")
        await page.js("document.getElementById('new').click()")
        await page.until(f"{EXCHANGES}.length === 0 && !document.getElementById('empty').hidden")
        await until(lambda: sum(worker.cancelled for worker in c.decodes) == 1)
        assert await page.js("document.getElementById('announcer').textContent") == "A new chat"
        answer_with(c, says("Hello."))
        await page.js("document.querySelector('.examples button').click()")
        await page.until(DONE)
        assert [len(body["messages"]) for body in bodies(c)] == [1, 1]


async def test_settings_reach_the_model_and_empty_ones_are_left_out(devtools: str) -> None:
    async with cluster() as c, tab(devtools) as page:
        adapters: list[dict[str, Any]] = [{"id": "base", "parent": None}, {"id": "poems", "parent": "base"}]
        for worker in (*c.prefills, *c.decodes):
            worker.models = adapters
            worker.behave = says("Yes.")
        await page.open(c.url + "/chat")
        await page.until("document.getElementById('model').options.length === 2")
        assert "adapter of base" in await page.js("document.getElementById('model').options[1].text")
        await set_field(page, "temperature", "")
        await set_field(page, "max-tokens", "")
        await ask(page)
        assert bodies(c)[0].keys() - {"bootstrap_host", "bootstrap_port", "bootstrap_room"} == {
            *("model", "messages", "stream", "stream_options")
        }
        for name, value in (("model", "poems"), ("temperature", "0.3"), ("max-tokens", "9"), ("system", "Be brief.")):
            await set_field(page, name, value)
        assert "poems · temperature 0.3 · at most 9 tokens" in await page.js(
            "document.getElementById('chosen').innerText"
        )
        await ask(page, "again")
        body = bodies(c)[1]
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("poems", 0.3, 9)
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}


async def test_below_an_answer_are_its_times_its_workers_and_its_time_line(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        answer_with(c, says("It is the city of Paris."))
        await ask(page)
        crossed = f"{LAST}.querySelector('.crossed')"
        await page.until(f"!{crossed}.hidden")
        prefill = next(worker for worker in c.prefills if worker.seen)
        decode = next(worker for worker in c.decodes if worker.seen)
        names = [worker.url.removeprefix("http://") for worker in (prefill, decode)]
        said = await page.js(f"{crossed}.innerText")
        assert said.index(names[0]) < said.index("→") < said.index(names[1])
        figures = await page.js(f"{LAST}.querySelector('.figures').innerText")
        assert figures.startswith("first token ") and figures.endswith(" · 6 tokens"), figures
        await page.js(f"{crossed}.click()")
        assert await page.js(f"{crossed}.getAttribute('aria-expanded')") == "true"
        await page.until(f"{LAST}.querySelectorAll('.timeline .inner').length === 2")
        text = await page.js(f"{LAST}.querySelector('.detail').innerText")
        assert all(word in text for word in ("prefill and KV transfer", "prefill stage", "decode stage", *names))
        assert await page.js(f"{LAST}.querySelector('.detail a').pathname") == "/dashboard"
        assert page.complaints == []


async def test_markup_of_a_model_is_text(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        hostile = (
            "<img src=x onerror=alert(1)> <script>alert(2)</script> [x](javascript:alert(3)) ![y](http://127.0.0.1:9/y)"
        )
        answer_with(c, says(f"{hostile}\n\n# {hostile}\n\n- {hostile}\n\n```{hostile}\n{hostile}\n```\n**{hostile}**"))
        await ask(page, hostile)
        assert (await page.js(ANSWER)).count("onerror=alert(1)") >= 5
        assert await page.js(f"{LAST}.querySelectorAll('img, script, a:not(.detail a), iframe, style').length") == 0
        assert page.complaints == []


async def test_markdown_becomes_elements_and_a_growing_answer_keeps_the_old_ones(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        answer_with(c, says(RICH))
        await ask(page)
        tags = await page.js(f"[...{LAST}.querySelector('.answer .said').children].map((n) => n.tagName).join(' ')")
        assert tags == "P OL FIGURE H3 BLOCKQUOTE"
        for tag, text in (("strong", "Paris"), ("em", "Seine"), ("li code", "old"), ("figcaption span", "python")):
            assert await page.js(f"{LAST}.querySelector('.said {tag}').innerText") == text
        hold = asyncio.Event()
        answer_with(c, says("first\n\n second", hold=hold))
        await ask(page, then=f"{ANSWER}.includes('first')")
        await page.js(f"{{ {LAST}.querySelector('.said p').id = 'kept' }}")
        hold.set()
        await page.until(f"{DONE} && {ANSWER}.includes('second')")
        assert await page.js("document.getElementById('kept').innerText") == "first"


async def test_thoughts_are_apart_and_not_sent_back(devtools: str) -> None:
    async def thinks(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "Let me see."}}]}
        return await stream(request, [thought, event("Paris.")])

    async with shown(devtools) as (c, page):
        answer_with(c, thinks)
        await ask(page)
        assert await page.js(ANSWER) == "Paris."
        assert await page.js(f"{LAST}.querySelector('.thoughts p').textContent") == "Let me see."
        await ask(page, "go on")
        assert "Let me see" not in json.dumps(bodies(c)[-1])


async def test_what_the_router_refuses_is_said_and_the_conversation_goes_on(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        await ask(page)
        message = "This model's maximum context length is 64 tokens."
        answer_with(c, always(400, {"error": {"message": message, "code": "context_length_exceeded"}}))
        await ask(page, "long")
        assert await page.js(f"{LAST}.querySelector('.error').innerText") == message
        assert await page.js("document.getElementById('announcer').textContent") == f"Failed: {message}"
        assert await page.js(f"{LAST}.querySelector('.again').innerText") == "Try again"
        answer_with(c, says("Fine."))
        await page.js(f"{LAST}.querySelector('.again').click()")
        await page.until(f"{DONE} && {ANSWER} === 'Fine.'")
        assert await page.js(f"{LAST}.querySelector('.error').hidden")


async def test_a_question_without_an_answer_is_not_sent_again(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        answer_with(c, always(400, {"error": {"message": "no"}}))
        await ask(page, "lost")
        answer_with(c, says("Yes."))
        await ask(page, "found")
        assert [m["content"] for m in bodies(c)[-1]["messages"]] == ["found"]


async def test_a_stream_that_breaks_and_a_router_that_is_gone_are_said(devtools: str) -> None:
    async with tab(devtools) as page:
        async with cluster() as c:
            answer_with(c, says("Paris."))
            await page.open(c.url + "/chat")
            await page.until("document.getElementById('model').value !== ''")

            async def breaks(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
                out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await out.prepare(request)
                await out.write(b"data: " + json.dumps(event("Par")).encode() + b"\n\n")
                await asyncio.sleep(0)  # the chunk leaves first
                return await resets(worker, request, body)

            c.decodes[0].behave = breaks
            await ask(page)
            assert await page.js(ANSWER) == "Par"
            assert "broke off" in await page.js(f"{LAST}.querySelector('.error').innerText")
        await ask(page, "still there?")
        assert "does not answer" in await page.js(f"{LAST}.querySelector('.error').innerText")


async def test_a_wrong_key_is_said_and_the_right_one_stays_in_the_tab(devtools: str) -> None:
    async with shown(devtools, ready=False, api_key="user", admin_api_key="admin") as (c, page):

        async def give(key: str) -> None:
            await page.until("document.getElementById('key').open")
            await page.type(key)
            await page.press("Enter")

        await give("wrong")
        await page.until("document.getElementById('key-why').innerText.includes('missing or wrong')")
        await give("user")
        await page.until("document.getElementById('model').value !== ''")
        await ask(page)
        await page.until(f"!{LAST}.querySelector('.crossed').hidden")  # with a client's key, not an admin's
        await reload(c, page)
        stores = "[localStorage, sessionStorage].map((store) => Object.keys(store).sort())"
        assert await page.js(stores) == [["tandem-chat", "tandem-theme"], ["tandem-chat", "tandem-key"]]
        assert "user" not in await page.js("localStorage['tandem-chat']")
        assert all("401" in complaint for complaint in page.complaints)  # Chromium's own word for each refusal


async def test_axe_finds_nothing_to_mend(devtools: str) -> None:
    """Roles, names, order of headings, contrast: of the page at rest, with an answer, its time line and the settings, and of the dialog."""
    async with shown(devtools, models=[SEEING]) as (c, page):
        await page.js(AXE + "; true")
        assert await page.violations() == []
        answer_with(c, says(RICH + "\n\n" + CODE))
        await give(page, "button", "one.png")
        await page.until(f"{THUMBS} === 1")
        await ask(page)
        await page.until(f"!{LAST}.querySelector('.crossed').hidden")
        await page.js(f"{LAST}.querySelector('.crossed').click()")
        await page.until(f"{LAST}.querySelectorAll('.timeline .inner').length === 2")
        await page.js("document.getElementById('settings').open = true")
        await give(page, "button", "two.png")
        await page.until(f"{THUMBS} === 1")
        assert await page.violations() == []
        answer_with(c, always(400, {"error": {"message": "no"}}))
        await ask(page, "worse")
        assert await page.violations() == []
        await page.js("document.getElementById('key-open').click()")
        assert await page.violations() == []


async def test_a_finished_answer_is_announced_once_and_landmarks_have_names(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        hold = asyncio.Event()
        answer_with(c, says("It is Paris.", hold=hold))
        await ask(page, then=f"{ANSWER}.includes('It')")
        live = "document.getElementById('announcer')"
        assert await page.js(f"{live}.textContent") == ""  # not word for word
        hold.set()
        await page.until(f"{live}.textContent === 'Answer: It is Paris.'")
        tree = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        roles = {(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if not n.get("ignored")}
        assert {("textbox", "Message"), ("button", "Send"), ("list", "Conversation"), ("navigation", "Pages")} <= roles
        assert {("heading", "You"), ("heading", "Answer"), ("region", "Your message")} <= roles
        assert any(role == "status" and n_live(n) for n in tree for role in [n.get("role", {}).get("value")])


def n_live(node: dict[str, Any]) -> bool:
    return any(p["name"] == "live" and p["value"]["value"] == "polite" for p in node.get("properties", ()))


async def test_the_switch_overrules_the_system(devtools: str) -> None:
    async with shown(devtools) as (_, page):
        await page.prefer(prefers_color_scheme="dark")
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = await page.js(ground)
        await page.js("document.getElementById('theme').click()")  # from "auto" to "light"
        assert await page.js(ground) != dark
        for _ in range(2):
            await page.js("document.getElementById('theme').click()")
        assert await page.js(ground) == dark


async def test_images_that_are_given_at_once_are_all_attached(devtools: str) -> None:
    async with shown(devtools, models=[SEEING]) as (_, page):
        gives = ", ".join(f"{GIVE}('paste', '{i}.png', 'image/png', {400 - 90 * i}, 400, false)" for i in range(4))
        await page.js(f"Promise.all([{gives}])")
        await page.until(f"{THUMBS} === 4")
        names = await page.js("[...document.querySelectorAll('#attached canvas')].map((one) => one.title)")
        assert sorted(names) == [f"{i}.png" for i in range(4)]


async def test_no_width_scrolls_sideways(devtools: str) -> None:
    async with shown(devtools, models=[SEEING]) as (c, page):
        answer_with(c, says(RICH + "\n\n" + "long" * 60))
        for i in range(4):
            await give(page, "button", f"{i}.png", side=500)
        await page.until(f"{THUMBS} === 4")
        assert await page.too_wide(but="pre") == []
        await ask(page, "word" * 60)
        await page.until(f"!{LAST}.querySelector('.crossed').hidden")
        await page.js(f"{LAST}.querySelector('.crossed').click()")
        await page.until(f"{LAST}.querySelectorAll('.timeline .inner').length === 2")
        await page.js("document.getElementById('settings').open = true")
        assert await page.too_wide(but="pre") == []  # nor is anything cut off


async def test_a_worker_that_serves_alone_has_the_page_and_nothing_of_a_router(devtools: str, tmp_path: Path) -> None:
    with start_worker(tmp_path, process=True, server={"api_key": "k"}) as worker:
        async with tab(devtools) as page:
            await page.open(worker.url + "/chat")
            await page.until("document.getElementById('key').open")
            await page.type("k")
            await page.press("Enter")
            await page.until("document.getElementById('model').value !== ''")
            await page.until("document.querySelectorAll('.of-router:not([hidden])').length === 0")
            await set_field(page, "max-tokens", "5")
            await ask(page, "hello")
            assert "5 tokens" in await page.js(f"{LAST}.querySelector('.figures').innerText")
            assert await page.js(f"{LAST}.querySelector('.crossed').hidden") is True
            assert all(url.startswith(worker.url + "/") and "/traces" not in url for url in page.asked), page.asked
            assert [said for said in page.complaints if "401" not in said] == []


def test_a_worker_of_a_pair_has_no_chat_page(tmp_path: Path) -> None:
    with start_worker(tmp_path, mode="decode") as worker:
        assert worker.http.get("/chat").status_code == 404 and "/chat" not in worker.http.get("/").json()["links"]
        assert worker.http.get("/web/base.css").status_code == 200
