"""Routes beside generation, of a whole cluster: what a unified worker has, its router has."""

import json
from typing import Any

import httpx2 as httpx

from tests.e2e.cluster import Cluster

TEXT = "k17 v42 k17"


def test_a_router_turns_text_into_tokens_and_back(nixl: Cluster) -> None:
    with httpx.Client(base_url=nixl.router, timeout=60) as router:
        told = [router.post(path, json={"prompt": TEXT}).json() for path in ("/tokenize", "/v1/tokenize/")]
        assert told[0] == told[1] and told[0]["count"] == len(told[0]["tokens"]) > 2
        assert told[0]["max_model_len"] == 32768
        back = router.post("/detokenize", json={"tokens": told[0]["tokens"]})
        assert TEXT in back.json()["text"]
        worker = httpx.post(f"{nixl.of('decode')[0].url}/tokenize", json={"prompt": TEXT}).json()
        assert worker == told[0]
        wrong = router.post("/detokenize", json={"tokens": [-1]})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "tokens"


def test_an_invocation_is_the_same_request(nixl: Cluster) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[Any, int]:
        reply = httpx.post(nixl.router + path, json=body, timeout=60).json()
        return reply["choices"][0], reply["usage"]["completion_tokens"]

    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4, "temperature": 0}
    text = {"prompt": TEXT, "max_tokens": 4, "temperature": 0}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
        assert answer("/invocations", body) == answer(path, body)
    stream = httpx.post(f"{nixl.router}/invocations", json={**chat, "stream": True}, timeout=60).text
    assert stream.endswith("data: [DONE]\n\n") and json.loads(stream.split("\n\n")[0][6:])["object"].endswith("chunk")


def test_loads_and_health_of_all_workers(nixl: Cluster) -> None:
    with httpx.Client(base_url=nixl.router, timeout=60) as router:
        rows = router.get("/v1/loads").json()["loads"]
        assert [(row["role"], row["disaggregation"]["mode"], row["dp_rank"]) for row in rows] == [
            ("prefill", "prefill", 0),
            ("decode", "decode", 1),
        ]
        assert {row["worker"] for row in rows} == {worker.url for worker in nixl.workers}
        assert [row["num_tokens"] >= 0 for row in router.get("/get_load").json()] == [True, True]
        home = router.get("/").json()
        assert home["models"] and home["version"] == router.get("/version").json()["version"] != "unknown"
        assert router.get("/ping").status_code == router.head("/v1/models/").status_code == 200
