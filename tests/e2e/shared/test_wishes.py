"""Fields that no server of ours knows, through one worker and through pairs: named in the answer, or refused."""

import json
from typing import Any

import aiohttp
import pytest

from tests.e2e.client import assert_all_back, session
from tests.e2e.cluster import Cluster

ANY = ["unified", "nixl", "mooncake"]
PROMPT = {"prompt": "k17 v42 k03 v91 k17", "temperature": 0}


@pytest.mark.parametrize("shape", ANY)
@pytest.mark.parametrize("stream", [False, True])
async def test_ignored_fields_are_named_and_others_refused(
    request: pytest.FixtureRequest, shape: str, stream: bool
) -> None:
    cluster: Cluster = request.getfixturevalue(shape)
    body = {**PROMPT, "max_tokens": 2, "stream": stream, "store": True}
    native = {"text": "k17", "sampling_params": {"max_new_tokens": 1, "temprature": 0}, "stream": stream}
    async with session() as http:
        async with http.post(f"{cluster.router}/v1/completions", json=body) as answer:
            assert answer.status == 200 and answer.headers["X-Tandem-Ignored-Fields"] == "store"
            assert await answer.read()
        for path, wrong, field in (
            ("/v1/completions", {**body, "prompt_logprobs": 0}, "prompt_logprobs"),
            ("/generate", native, "sampling_params.temprature"),
        ):
            assert await refused(http, cluster.router + path, wrong) == field
    await assert_all_back(cluster)


async def refused(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    async with http.post(url, json=body) as answer:
        assert answer.status == 400
        return str(json.loads(await answer.read())["error"]["param"])
