"""The chat page in a real Chromium: what outlives a reload, images, code, the limit of tokens."""

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.frontend.conftest import start_worker
from tests.frontend.vision import write_vision_checkpoint
from tests.router.dummies import Behaviour, DummyWorker, stream, until
from tests.router.http.browser import Page, tab
from tests.router.http.test_chat_page import (
    ANSWER,
    BLIND,
    CODE,
    DONE,
    EXCHANGES,
    LAST,
    SEEING,
    THUMBS,
    answer_with,
    ask,
    bodies,
    event,
    give,
    reload,
    says,
    set_field,
    shown,
)

QUESTIONS = f"{EXCHANGES}.map((n) => n.querySelector('.question .said').innerText)"
HINT = "document.getElementById('hint').innerText"


async def new_chat(page: Page) -> None:
    await page.js("document.getElementById('new').click()")
    await page.until(f"{EXCHANGES}.length === 0")


async def test_a_conversation_outlives_a_reload_and_a_new_chat_ends_it(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        await set_field(page, "system", "Be brief.")
        await ask(page, "first")
        await page.until(f"!{LAST}.querySelector('.crossed').hidden")
        workers = await page.js(f"{LAST}.querySelector('.crossed').innerText")
        await reload(c, page)
        assert await page.js(QUESTIONS) == ["first"] and await page.js(ANSWER) == "It is Paris."
        assert "3 tokens" in await page.js(f"{LAST}.querySelector('.figures').innerText")
        assert await page.js(f"{LAST}.querySelector('.crossed').innerText") == workers
        await ask(page, "second")
        sent = [(m["role"], m["content"].strip()) for m in max((b["messages"] for b in bodies(c)), key=len)]
        assert sent == [("system", "Be brief."), ("user", "first"), ("assistant", "It is Paris."), ("user", "second")]
        await new_chat(page)
        await reload(c, page)
        assert await page.js(f"{EXCHANGES}.length") == 0 and not await page.js(
            "document.getElementById('empty').hidden"
        )
        assert page.complaints == []


async def test_an_answer_that_a_reload_interrupts_is_kept_as_far_as_it_came(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        answer_with(c, says("Paris is big", hold=asyncio.Event()))
        await ask(page, then=f"{ANSWER}.includes('Paris')")
        await reload(c, page)
        await until(lambda: sum(worker.cancelled for worker in c.decodes) == 1)
        assert await page.js(ANSWER) == "Paris" and await page.js(DONE)
        assert await page.js(f"{LAST}.querySelector('.figures').innerText") == "stopped when the page was left"


async def test_each_tab_goes_on_with_its_own_conversation(devtools: str) -> None:
    async with shown(devtools) as (c, page), tab(devtools) as other, tab(devtools) as third:
        await ask(page, "a")
        await reload(c, other)
        assert await other.js(QUESTIONS) == ["a"]  # a new tab begins with the last conversation
        await ask(other, "b")
        await ask(page, "c")
        for each, questions in ((other, ["a", "b"]), (page, ["a", "c"])):
            await reload(c, each)
            assert await each.js(QUESTIONS) == questions
        await new_chat(other)
        await reload(c, other)
        assert await other.js(QUESTIONS) == []
        await reload(c, third)
        assert await third.js(QUESTIONS) == ["a", "c"]


async def test_what_is_kept_is_bounded_and_what_is_no_conversation_is_left_alone(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        many = "Array.from({ length: 9 }, (_, i) => ({ question: `${i}`, text: 'x'.repeat(100), pictures: [{ url: 'y'.repeat(1000) }] }))"
        shorten = f"import('/chat/memory.js').then((m) => JSON.parse(m.shorten({{ exchanges: {many} }}, LIMIT)))"
        kept = await page.js(shorten.replace("LIMIT", "4000"))
        assert [len(each["pictures"]) for each in kept["exchanges"]] == [0] * 7 + [1] * 2
        assert [each.get("lost") for each in kept["exchanges"]][6:] == [1, None, None] and not kept.get("shortened")
        kept = await page.js(shorten.replace("LIMIT", "500"))
        questions = [each["question"] for each in kept["exchanges"]]
        assert (
            0 < len(questions) < 9 and questions == [str(i) for i in range(9)][-len(questions) :] and kept["shortened"]
        )
        for junk in ("{", '{"version": 1, "exchanges": [{}, 7]}', '{"version": 99}'):
            await page.js(f"localStorage['tandem-chat'] = sessionStorage['tandem-chat'] = {json.dumps(junk)}")
            await reload(c, page)
            assert await page.js(f"{EXCHANGES}.length") == 0
        await ask(page, "still works")
        assert page.complaints == []


async def test_an_image_goes_to_a_model_that_sees(devtools: str) -> None:
    async with shown(devtools, models=[SEEING]) as (c, page):
        for how in ("button", "paste", "drop"):
            await give(page, how, "one.png")
            await page.until(f"{THUMBS} === 1")
            await ask(page, f"What is it? ({how})")
            assert await page.js(THUMBS) == 0
            message = max((body["messages"] for body in bodies(c)), key=len)[-1]
            image, text = message["content"]
            assert text == {"type": "text", "text": f"What is it? ({how})"} and image["type"] == "image_url"
            assert image["image_url"]["url"].startswith("data:image/png;base64,")
        assert page.complaints == []


async def test_images_are_removed_edited_bounded_and_outlive_a_reload(devtools: str) -> None:
    async with shown(devtools, models=[SEEING, BLIND]) as (c, page):
        for i in range(5):
            await give(page, "paste", f"{i}.png")
        await page.until(f"{HINT}.includes('at most 4 images')")
        for _ in range(3):
            await page.js("document.querySelector('#attached .remove').click()")
        await give(page, "drop", "words.txt", type="text/plain")
        await page.until(f"{HINT} === 'Only images can be attached.'")
        await give(page, "button", "noise.png", side=1400, noise=True)
        await page.until(f"{THUMBS} === 2")
        await page.press("Enter")  # without words
        await page.until(f"{EXCHANGES}.length === 1 && {DONE}")
        small, large = [part["image_url"]["url"] for part in bodies(c)[0]["messages"][0]["content"]]
        assert small.startswith("data:image/png") and large.startswith("data:image/jpeg") and len(large) <= 500_000
        await reload(c, page)
        await page.until(f"{LAST}.querySelectorAll('.pictures canvas').length === 2")
        await page.until(f"{LAST}.querySelectorAll('.pictures canvas')[1].width === 320")
        await ask(page, "And now?")
        first, *_ = max((body["messages"] for body in bodies(c)), key=len)
        assert [part["image_url"]["url"] for part in first["content"]] == [small, large]
        await page.js(f"{LAST}.querySelector('.question button').click()")
        await page.press("Escape")
        await page.js(f"{EXCHANGES}[0].querySelector('.question button').click()")
        assert await page.js(THUMBS) == 2
        await page.press("Escape")
        assert await page.js(THUMBS) == 0
        assert page.complaints == []


async def test_a_real_worker_decodes_what_the_page_sends(devtools: str, tmp_path: Path) -> None:
    write_vision_checkpoint(tmp_path / "tiny")
    with start_worker(tmp_path, process=True) as worker:
        async with tab(devtools) as page:
            await page.open(worker.url + "/chat")
            await page.until("!document.getElementById('attach').hidden")
            await set_field(page, "max-tokens", "5")
            await give(page, "drop", "grey.png", side=56)
            await page.until(f"{THUMBS} === 1")
            await ask(page, "What is it?")
            (image,) = worker.scheduler.seen[-1].images
            assert image.size == (1, 56, 56) and set(image.pixels) == {90}
            assert page.complaints == []


async def test_a_model_that_reads_text_gets_text(devtools: str) -> None:
    async with shown(devtools, models=[SEEING, BLIND]) as (c, page):
        await give(page, "button", "one.png")
        await page.until(f"{THUMBS} === 1")
        await ask(page, "What is it?")
        await set_field(page, "model", "blind")
        assert await page.js("document.getElementById('attach').hidden")
        await give(page, "paste", "two.png")
        await page.until(f"{HINT} === 'This model does not take images.'")
        assert await page.js(THUMBS) == 0
        await ask(page, "And in words?")
        last = next(body for body in bodies(c) if body["model"] == "blind")
        assert [m["content"].strip() for m in last["messages"]] == ["What is it?", "It is Paris.", "And in words?"]


async def test_code_has_colours_and_loses_no_character(devtools: str) -> None:
    async with shown(devtools) as (c, page):
        answer_with(c, says(CODE))
        await ask(page)
        code = f"[...{LAST}.querySelectorAll('pre code')]"
        kinds = f"{code}[0].querySelectorAll('span')"
        found = [list(pair) for pair in await page.js(f"[...{kinds}].map((n) => [n.className, n.textContent])")]
        assert found == [
            ["comment", "# Say it."],
            ["keyword", "def"],
            ["string", '"<b>Paris</b>"'],
            ["keyword", "return"],
            ["number", "42"],
        ]
        assert await page.js(f"{code}.map((n) => n.textContent)") == [
            part.split("\n", 1)[1].rstrip("\n") for part in CODE.split("```")[1::2]
        ]
        assert await page.js(f"{code}[1].children.length") == 0  # a language that the page does not know
        texts = [
            '"""open',
            "'a\\",
            "/* x",
            "`${a",
            "# \"q\" 'r'",
            "0x1F 1_000.5e-3 a1",
            "'a 'b' x",
            "<!-- <b>",
            "$x = 'é'; -- y\n\"",
            "",
        ]
        names = ["python", "C++", "js", "sh", "sql", "lua", "json", "css", "html", "yaml", "none"]
        lost = (
            f"import('/chat/code.js').then(({{ coloured }}) => {json.dumps(names)}.flatMap((name) => {json.dumps(texts)}"
            ".filter((text) => coloured(text, name).map((node) => node.textContent ?? node).join('') !== text)))"
        )
        assert await page.js(lost) == []
        assert page.complaints == []


async def test_code_is_copied_also_without_a_clipboard(devtools: str) -> None:
    """As on plain HTTP from another machine, where browsers give a page none."""
    async with shown(devtools) as (c, page):
        answer_with(c, says(CODE))
        await ask(page)
        await page.js("Object.defineProperty(navigator, 'clipboard', { value: undefined }), true")
        await page.js(
            "document.addEventListener('copy', () => { globalThis.taken = getSelection().toString(); }), true"
        )
        button = f"{LAST}.querySelector('figcaption button')"
        await page.call("Runtime.evaluate", expression=f"{button}.click()", userGesture=True)
        await page.until(f"{button}.innerText === 'Copied'")
        assert (await page.js("globalThis.taken")).startswith("# Say it.\ndef say")


def ends_for(reason: str) -> Behaviour:
    async def behave(worker: DummyWorker, request: Any, body: dict[str, Any]) -> Any:
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
        return await stream(request, [event("Paris"), last, {"choices": [], "usage": {"completion_tokens": 1}}])

    return behave


async def test_an_answer_has_a_limit_that_is_shown_and_can_be_changed(devtools: str) -> None:
    async with shown(devtools, models=[SEEING, BLIND]) as (c, page):
        chosen, figures = "document.getElementById('chosen').innerText", f"{LAST}.querySelector('.figures').innerText"
        assert "at most 1024 tokens" in await page.js(chosen)
        answer_with(c, ends_for("stop"))
        await ask(page, "1")
        assert "limit" not in await page.js(figures)
        await set_field(page, "model", "blind")  # whose context holds 600 tokens
        assert "at most 300 tokens" in await page.js(chosen)
        answer_with(c, ends_for("length"))
        await ask(page, "2")
        assert (await page.js(figures)).endswith("1 token, cut at the limit")
        await set_field(page, "max-tokens", "7")
        await set_field(page, "model", "sees")
        await ask(page, "3")
        assert {(b["messages"][-1]["content"], b["max_tokens"]) for b in bodies(c)} == {
            ("1", 1024),
            ("2", 300),
            ("3", 7),
        }


async def test_examples_suit_the_model(devtools: str) -> None:
    recall = {"id": "recall", "parent": None, "max_model_len": 32768}
    async with shown(devtools, models=[SEEING, recall]) as (_, page):
        first = "document.querySelector('.examples button').innerText"
        assert "capital of France" in await page.js(first)
        await set_field(page, "model", "recall")
        assert await page.js(first) == "k17 v42 k03 v91 k17"
        assert "knows no language" in await page.js("document.getElementById('about').innerText")
