"""Images through the router: what URLs name is fetched once, and both workers of a pair get the same bytes."""

import json
import time
from typing import Any

import pytest
from aiohttp import web

from router.body import TOKENS_PER_IMAGE, Api, parse_body
from router.choice.prefix_index import keyed_prompt
from router.parts.encoders import Encoders
from router.parts.images import BodyImages
from router.pool.workers import WorkerTable
from router.requests.dispatch import concerns
from service.flags import ConfigError
from service.http.errors import ApiError
from service.images.bodies import data_url
from service.images.hosts import ImageFlags
from tests.images.hosts import INSIDE, OUTSIDE, PNG, answer_png, host
from tests.router.dummies import CHAT, Cluster, cluster, until

NETWORKS = (f"{OUTSIDE}/32",)
SEEN = data_url(PNG)
BIG = "data:image/png;base64," + "A" * 400_000


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def body_of(path: str, url: str) -> dict[str, Any]:
    source = {"type": "image", "source": {"type": "url", "url": url}}
    return {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part(url)]}]},
        "/v1/messages": {"messages": [{"role": "user", "content": [source]}], "max_tokens": 1},
        "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
        "/generate": {"text": "a", "image_data": url},
    }[path]


FIELDS = {
    "/v1/chat/completions": "messages[0].content[1].image_url",
    "/v1/messages": "messages[0].content[0].source",
    "/v1/responses": "input[0].content[0].image_url",
    "/generate": "image_data",
}
PATHS = list(FIELDS)


@pytest.mark.parametrize(("path", "unified"), [(path, unified) for path in PATHS for unified in (0, 1)])
async def test_all_workers_get_the_same_bytes(path: str, unified: int) -> None:
    """A host that answers differently each time is asked once."""
    count = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        return web.Response(body=PNG + b"%d" % count)

    async with host(answer) as outside, cluster(unified=unified, allowed_media_networks=NETWORKS) as c:
        status, _, text = await c.post(path, body_of(path, f"{outside.url}/a"))
        assert status == 200, text
        bodies = [json.dumps(worker.seen[0].body) for worker in (*c.prefills, *c.decodes)]
        assert all(json.dumps(data_url(PNG + b"1")) in body and outside.url not in body for body in bodies)
        assert len(bodies) == 2 - unified and len(outside.seen) == 1


async def test_retries_send_what_was_fetched() -> None:
    async def fail_once(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(worker.seen) == 1:
            return web.json_response({"error": {"message": "full", "code": "queue_full"}}, status=503)
        return web.json_response({"from": worker.name, "choices": []})

    async with host(answer_png) as outside, cluster(decode=[fail_once] * 2, allowed_media_networks=NETWORKS) as c:
        await c.post("/v1/chat/completions", {**CHAT, **body_of("/v1/chat/completions", outside.url)})
        assert len(outside.seen) == 1


async def test_workers_get_the_time_that_fetching_leaves() -> None:
    """The client's deadline runs meanwhile: they got all of it."""

    async def slow(request: web.Request) -> web.StreamResponse:
        end_s = time.monotonic() + 0.2  # a timer may fire early
        await until(lambda: time.monotonic() >= end_s)
        return await answer_png(request)

    async with host(slow) as outside, cluster(allowed_media_networks=NETWORKS) as c:
        body = body_of("/generate", f"{outside.url}/a")
        assert (await c.post("/generate", body, headers={"X-Request-Timeout": "60"}))[0] == 200
        (prefill,), (decode,) = c.prefills[0].seen, c.decodes[0].seen
        assert 0 < float(prefill.headers["x-request-timeout"]) <= 59.8
        assert 0 < float(decode.headers["x-request-timeout"]) <= 59.8


async def test_a_conversation_brings_its_images() -> None:
    async def respond(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(
            {"id": f"resp_{len(worker.seen):032x}", "object": "response", "status": "completed", "output": []}
        )

    async with host(answer_png) as outside, cluster(allowed_media_networks=NETWORKS) as c:
        c.prefills[0].behave = c.decodes[0].behave = respond
        _, _, text = await c.post("/v1/responses", body_of("/v1/responses", outside.url))
        again = {"input": "b", "previous_response_id": json.loads(text)["id"]}
        assert (await c.post("/v1/responses", again))[0] == 200
        assert c.decodes[0].seen[-1].body["history"][0]["content"][0]["image_url"] == SEEN


async def refusal(c: Cluster, path: str, url: str) -> tuple[int, str]:
    status, _, text = await c.post(path, body_of(path, url))
    error = json.loads(text)["error"]
    return status, error["message"]


@pytest.mark.parametrize(("path", "field"), FIELDS.items())
async def test_refusals_name_the_part(path: str, field: str) -> None:
    async with host(answer_png, INSIDE) as inside, cluster(allowed_media_networks=NETWORKS) as c:
        status, message = await refusal(c, path, inside.url)
        assert status == 400 and message.startswith(f"{field}: its host has no public address")
        assert inside.seen == [] and c.prefills[0].seen == c.decodes[0].seen == []


async def test_fetching_can_be_switched_off() -> None:
    async with cluster(disable_image_fetch=True) as c:
        assert "--disable-image-fetch" in (await refusal(c, "/generate", "http://a.org/"))[1]


async def test_too_many_are_refused_before_any_is_fetched() -> None:
    async with host(answer_png) as outside, cluster(allowed_media_networks=NETWORKS, max_images_per_request=2) as c:
        body = {"text": "a", "image_data": [outside.url] * 3}
        status, _, text = await c.post("/generate", body)
        assert status == 400 and "image_data[2]: is more than the 2 images" in text.decode() and outside.seen == []


async def test_what_is_in_the_body_passes_untouched() -> None:
    async with cluster() as c:
        body = {"text": "a", "image_data": [BIG, "AAAA"], "sampling_params": {"max_new_tokens": 1}}
        assert (await c.post("/generate", body))[0] == 200
        assert c.prefills[0].seen[0].body["image_data"] == c.decodes[0].seen[0].body["image_data"] == [BIG, "AAAA"]


async def test_a_wrong_rule_ends_the_start() -> None:
    with pytest.raises(ConfigError, match=r"--allowed-media-domains: 'http://a.org' is no HOST"):
        async with cluster(allowed_media_domains=("http://a.org",)):
            pass


def parsed(api: Api, body: dict[str, Any]) -> Any:
    return parse_body(api, json.dumps(body).encode())


def taker() -> BodyImages:
    encoders = Encoders(table=WorkerTable(), secret=None)
    return BodyImages(ImageFlags(), part_of=encoders.part_of, most_bytes=1 << 26)


async def test_an_image_counts_as_some_tokens_at_any_size() -> None:
    given = parsed(Api.CHAT, {"messages": [{"role": "user", "content": [part(BIG), part("data:,b")]}]})
    taken = await taker().take(given)
    assert 2 * TOKENS_PER_IMAGE < taken.body.prompt_tokens == taken.shown.prompt_tokens < 2 * TOKENS_PER_IMAGE + 200
    assert taken.body.fields == given.fields
    native = await taker().take(parsed(Api.GENERATE, {"text": "abcd", "image_data": BIG}))
    assert native.body.prompt_tokens == TOKENS_PER_IMAGE + 2


async def test_routing_sees_digests() -> None:
    """Equal conversations have equal keys, others others, and none has the bytes of an image."""

    async def keys(url: str) -> list[bytes]:
        messages = [{"role": "user", "content": [part(url), {"type": "text", "text": "x" * 2000}]}]
        return keyed_prompt((await taker().take(parsed(Api.CHAT, {"messages": messages}))).shown)[0]

    one, again, other = await keys(BIG), await keys(BIG), await keys(BIG + "A")
    assert one == again and not set(one) & set(other) and 3 <= len(one) <= 6


async def test_a_video_is_seen_as_one_and_never_fetched() -> None:
    frames = "data:video/jpeg;base64," + ",".join(["A" * 4000] * 50)
    for url in (frames, "http://a.org/a.mp4"):
        video = {"type": "video_url", "video_url": {"url": url}}
        for api, body in (
            (Api.CHAT, {"messages": [{"role": "user", "content": [part(SEEN), video]}]}),
            (Api.GENERATE, {"text": "a", "image_data": [SEEN], "video_data": url}),
        ):
            given = parsed(api, body)
            assert concerns(taker(), json.dumps(body).encode())
            taken = await taker().take(given)
            assert len(set(taken.digests)) == 2 and not taken.fetched
            assert taken.body.fields == given.fields and taken.body.prompt_tokens < 2 * TOKENS_PER_IMAGE + 100
            assert frames not in json.dumps({name: bytes(raw).decode() for name, raw in taken.shown.fields.items()})
    only = {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": frames}}]}]}
    assert concerns(taker(), json.dumps(only).encode())


async def test_bodies_without_images_enter_nothing() -> None:
    chat = {"messages": [{"role": "user", "content": "an image http://a.org"}]}
    assert not concerns(taker(), json.dumps(chat).encode())
    assert Api.COMPLETIONS not in taker().apis
    text = parsed(Api.GENERATE, {"text": '"image_url"'})
    assert (await taker().take(text)).shown is text
    for path in PATHS:
        assert Api(path) in taker().apis and concerns(taker(), json.dumps(body_of(path, "http://a.org")).encode())


async def test_wrong_shapes_are_left_to_workers() -> None:
    for messages in (
        5,
        [5],
        [{"content": {"type": "image_url"}}],
        [{"content": [{"type": "image_url", "image_url": 5}]}],
    ):
        given = parsed(Api.CHAT, {"messages": messages, "note": {"image": 1}})
        taken = await taker().take(given)
        assert taken.body is taken.shown is given


async def test_an_error_is_in_the_order_of_the_parts() -> None:
    body = {"text": "a", "image_data": ["http://127.0.0.1/a", "ftp://a.org/"]}
    with pytest.raises(ApiError) as caught:
        await taker().take(parsed(Api.GENERATE, body))
    assert caught.value.field == "image_data[0]"
