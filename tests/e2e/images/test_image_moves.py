"""Answers to images move between decode workers with their KV and recurrent states, and go on where one dies: no client sees it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import session
from tests.e2e.cluster import several, tandem
from tests.e2e.failover.test_failover import Bodies, Fleet, busy, failovers, kill, shown, streams
from tests.e2e.failover.test_moves import metric
from tests.e2e.settings import settings
from tests.e2e.test_all_at_once import MODEL
from tests.frontend.vision import file_of, picture, url_of

FLAGS = ("--stream", "threaded", "--num-threads", "1", "--max-total-tokens", "4096")
NEW, SOME = 90, 20  # events: a busy machine reads them late
URLS = [url_of(file_of(picture(64, 48, seed=i))) for i in range(2)]
ENCODED = "tandem_num_encoded_images_total"


def native(*images: int) -> tuple[str, dict[str, Any]]:
    text = "<|vision_start|><|image_pad|><|vision_end|>" * len(images) + "What do you see?"
    sampling = {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}
    body = {"text": text, "sampling_params": sampling, "return_logprob": True}
    return "/generate", {**body, "image_data": [URLS[image] for image in images]} if images else body


def chat(*images: int) -> tuple[str, dict[str, Any]]:
    content = [{"type": "image_url", "image_url": {"url": URLS[image]}} for image in images]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "What do you see?"}]}]
    body = {"model": "default", "messages": messages, "max_tokens": NEW, "ignore_eos": True}
    return "/v1/chat/completions", {**body, "temperature": 0.9, "seed": 5, "n": 2}


BODIES: Bodies = {"one": native(0), "other": native(1), "two": chat(0, 1), "text": native()}


@pytest.mark.slow
async def test_answers_to_images_move_and_go_on(temp: Path) -> None:
    serve = ("serve", "--port", "0", *MODEL, *FLAGS, "--disaggregation-mode")
    commands = {"p": (*serve, "prefill", "--disaggregation-bootstrap-port", "0"), "a": (*serve, "decode")}
    with several(temp, {**commands, "b": commands["a"]}, settings(stream_delay_s=0.02)) as workers:
        prefill, answering = workers["p"], [workers["a"], workers["b"]]
        ways = ("--prefill", prefill.url, *(word for worker in answering for word in ("--decode", worker.url)))
        with tandem(temp / "r", "router", "--port", "0", "--pd-disaggregation", *ways) as router:
            fleet = Fleet(router.url, answering, [prefill], ())
            right = [shown(events) for events in await streams(router.url, [0] * len(BODIES), BODIES)]
            assert len({str(one) for one in right}) == len(right), "images and seeds make no difference"
            encoded = await metric(prefill.url, ENCODED)
            for number, way in enumerate((migrate, lose)):
                counts = [0] * len(BODIES)
                load = asyncio.ensure_future(streams(router.url, counts, BODIES))
                while min(counts) < SOME and not load.done():
                    await asyncio.sleep(0.005)
                await way(fleet)
                assert [shown(events) for events in await load] == right, way.__name__
                results = await failovers(router.url)
                assert results.get(("moved", "went_on")[number], 0) > 0 and not results.get("ended"), results
            assert await metric(prefill.url, ENCODED) == encoded, "prefill has their features, or their KV"
            for worker in fleet.answering:
                assert await metric(worker.url, ENCODED) == 0


async def migrate(fleet: Fleet) -> None:
    async with session() as http, http.post(f"{fleet.router}/workers/migrate", json={"url": busy(fleet).url}) as answer:
        assert answer.status == 200, await answer.text()


async def lose(fleet: Fleet) -> None:
    lost = busy(fleet)
    kill(lost)
    fleet.answering.remove(lost)
