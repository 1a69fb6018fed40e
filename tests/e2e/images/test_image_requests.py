"""Images through a whole cluster of real processes: router, frontends, schedulers, a vision tower, KV on its way; beside transformers."""

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from aiohttp import web
from PIL import Image
from transformers import AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from tests.e2e.client import assert_all_back
from tests.e2e.cluster import Cluster, cluster
from tests.frontend.vision import file_of, picture, url_of
from tests.images.hosts import OUTSIDE, host
from tests.models.tiny_checkpoints import CHAT_TEMPLATE
from tests.models.tiny_seeing import END, IMAGE, MERGE, START, make_seeing_checkpoint

FLAGS = ("--dtype", "float32", "--max-total-tokens", "8192", "--chunked-prefill-size", "32", "--page-size", "4")
FILES = [file_of(picture(37, 50, mode="RGBA", seed=1)), file_of(picture(90, 64, seed=2), "JPEG")]
IDS = [20, 21, START, IMAGE, END, 22, 23, START, IMAGE, END, 25, 26]
NEW = 8
PARTS = "{%- for p in m['content'] -%}{%- if p['type'] == 'image' -%}<special_6><special_4><special_7>{%- else -%}{{ p['text'] }}{%- endif -%}{%- endfor -%}"


def seeing_checkpoint(folder: Path) -> str:
    """Of a model that chats about images."""
    path = make_seeing_checkpoint(folder, "qwen3_vl")
    seeing = CHAT_TEMPLATE.replace(
        "{{ '<special_3>' + m['role'] + '\\n' + m['content'] + '<eos>\\n' }}", "<special_3>" + PARTS
    )
    assert PARTS in seeing
    (folder / "chat_template.jinja").write_text(seeing)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return seeing_checkpoint(tmp_path_factory.mktemp("seeing") / "qwen3_vl")


@pytest.fixture(scope="module")
def pd(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    fetches = ("--allowed-media-networks", f"{OUTSIDE}/32")
    with cluster(
        tmp_path_factory.mktemp("pd"), "--transfer-backend", "nixl", "--model-path", path, *FLAGS, *fetches
    ) as c:
        yield c
        asyncio.run(assert_all_back(c))


@pytest.fixture(scope="module")
def wanted(path: str) -> tuple[int, list[int]]:
    """Of transformers, greedily: tokens of the prompt, and of its answer."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    seen = Qwen2VLImageProcessorPil.from_pretrained(path)(
        images=[Image.open(io.BytesIO(data)) for data in FILES], return_tensors="pt"
    )
    counts = iter((seen["image_grid_thw"].prod(1) // MERGE**2).tolist())
    ids = [token for one in IDS for token in ([one] * next(counts) if one == IMAGE else [one])]
    answer: list[int] = []
    for _ in range(NEW):
        all_ids = torch.tensor([ids + answer])
        with torch.inference_mode():
            logits = model(input_ids=all_ids, mm_token_type_ids=(all_ids == IMAGE).long(), **seen).logits
        answer.append(int(logits[0, -1].argmax()))
    return len(ids), answer


def generate(url: str, image_data: list[str]) -> tuple[int, list[int]]:
    body: dict[str, Any] = {"input_ids": IDS, "image_data": image_data}
    body["sampling_params"] = {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/generate", json=body, timeout=60).raise_for_status().json()
    return answer["meta_info"]["prompt_tokens"], answer["output_ids"]


async def test_a_pair_sees_what_transformers_sees(pd: Cluster, wanted: tuple[int, list[int]]) -> None:
    """One file by URL, which the router fetches, one in the body."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=FILES[0], content_type="image/png")

    async with host(answer) as outside:
        found = await asyncio.to_thread(generate, pd.router, [f"{outside.url}/a.png", url_of(FILES[1])])
        assert found == wanted and len(outside.seen) == 1
    assert generate(pd.router, [url_of(data) for data in reversed(FILES)]) != wanted
    assert generate(pd.router, [url_of(data) for data in FILES]) == wanted


def test_chats_of_a_pair_share_the_prefix_of_an_image(pd: Cluster) -> None:
    part = {"type": "image_url", "image_url": {"url": url_of(FILES[1])}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "what is it?"}]}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    first, again = (
        httpx.post(f"{pd.router}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
        for _ in range(2)
    )
    assert first["choices"][0]["message"] == again["choices"][0]["message"]
    usage = again["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 8


def test_a_refusal_comes_through_the_router(pd: Cluster) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "http://127.0.0.1:1/"}]}]}
    answer = httpx.post(f"{pd.router}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages[0].content[0].image_url"
    body["messages"][0]["content"][0]["image_url"] = url_of(b"no image")  # type: ignore[index]
    answer = httpx.post(f"{pd.router}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400 and "no image that can be read" in answer.json()["error"]["message"]
