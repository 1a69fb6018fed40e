"""Other projects' routers (from PyPI) in the place of ours, in front of our workers: the core cases that each has."""

import asyncio
import contextlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from deploy.launcher.ports import free_ports
from tests.e2e.client import assert_all_back, generate_all
from tests.e2e.cluster import Cluster, end_tree, wait_until
from tests.e2e.leaders import Leader, start_process
from tests.e2e.workload import recall_body

PROMPT = "k17 v42 k03 v91 k17"
READY_S = 60.0
# Module and flags of each router, by its name and what is behind it.
SGLANG = ("sglang_router.launch_router", "--worker-startup-check-interval", "1", "--log-level", "warn")
SMG = ("smg", "launch", "--worker-startup-check-interval", "1", "--log-level", "debug")
VLLM = ("vllm_router.launch_router", "--worker-startup-check-interval", "1", "--log-level", "debug")
PAIR = ("--pd-disaggregation", "--policy", "random")
ROUTERS = {
    "sglang-router, a pair": (*SGLANG, *PAIR),
    "sglang-router": SGLANG,
    "smg, a pair": (*SMG, *PAIR),
    "smg": SMG,
    "vllm-router": VLLM,
    "vllm-router, a pair": (*VLLM, "--vllm-pd-disaggregation", "--policy", "random"),
}


@pytest.fixture(scope="module", params=ROUTERS)
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    behind: Cluster = request.getfixturevalue("nixl" if request.param.endswith("pair") else "unified")
    with other_router(ROUTERS[request.param], behind, tmp_path_factory.mktemp("other") / "router.log") as url:
        yield url


@contextlib.contextmanager
def other_router(command: tuple[str, ...], behind: Cluster, log: Path) -> Iterator[str]:
    port, prometheus = free_ports(2)
    whole = [sys.executable, "-m", *command, *worker_flags(behind)]
    whole += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(prometheus)]
    process = start_process(whole, log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _is_ready(url, process, log), within_s=READY_S, what="the router ready")
        yield url
    finally:
        end_tree(process)


def worker_flags(behind: Cluster) -> list[str]:
    flags = []
    for worker in behind.workers:
        if worker.role == "prefill":
            info = httpx.get(f"{worker.url}/server_info").json()
            flags += ["--prefill", worker.url, str(info["disaggregation_bootstrap_port"])]
        else:
            flags += ["--decode" if worker.role == "decode" else "--worker-urls", worker.url]
    return flags


def _is_ready(url: str, process: Leader, log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        return httpx.get(f"{url}/readiness", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(autouse=True)
def all_back(nixl: Cluster) -> Iterator[None]:
    """After each test: every page, row and room."""
    yield
    asyncio.run(assert_all_back(nixl))


@pytest.fixture
def client(front: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front}/v1", api_key="any", max_retries=0, timeout=60) as api:
        yield api


def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "recall",
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": 5,
    }
    answer = client.chat.completions.create(**ask)
    assert (answer.choices[0].message.content or "").strip() == "v42" and answer.choices[0].finish_reason == "stop"
    events = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
    assert text.strip() == "v42" and events[-1].usage is not None and events[-1].usage.completion_tokens == 2


def test_completions_and_their_stream(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "recall", "prompt": PROMPT, "temperature": 0, "max_tokens": 3}
    assert client.completions.create(**ask).choices[0].text.split() == ["v42", "k03", "v91"]
    streamed = "".join(e.choices[0].text for e in client.completions.create(**ask, stream=True))
    assert streamed.split() == ["v42", "k03", "v91"]
    batch = client.completions.create(**{**ask, "prompt": [PROMPT, "k01 v02 k01"], "max_tokens": 1})
    assert [c.text.split() for c in batch.choices] == [["v42"], ["v02"]]


def test_two_samples(client: openai.OpenAI) -> None:
    """sglang-router gives chat a room a sample, and completions one room for both."""
    ask: dict[str, Any] = {"model": "recall", "temperature": 0, "n": 2, "max_tokens": 1}
    chat = client.chat.completions.create(**ask, messages=[{"role": "user", "content": PROMPT}])
    assert [(c.message.content or "").strip() for c in chat.choices] == ["v42", "v42"]
    text = client.completions.create(**ask, prompt=PROMPT)
    assert [c.text.strip() for c in text.choices] == ["v42", "v42"]


@pytest.mark.parametrize("stream", [False, True])
async def test_native_requests_side_by_side_recall_exactly(front: str, stream: bool) -> None:
    rng = random.Random(11)
    drawn = [recall_body(rng, rng.randint(5, 250), max_new_tokens=4) for _ in range(24)]
    answers = await generate_all(front, [{**body, "stream": stream} for body, _ in drawn])
    assert [a["output_ids"] for a in answers] == [wanted for _, wanted in drawn]


def test_native_batches_and_samples(front: str) -> None:
    rng = random.Random(12)
    (one, first), (two, second) = (recall_body(rng, 20, max_new_tokens=3) for _ in range(2))
    sampling = one["sampling_params"]
    body = {"input_ids": [one["input_ids"], two["input_ids"]], "sampling_params": sampling}
    assert [a["output_ids"] for a in _post(front, body)] == [first, second]
    samples = {"input_ids": one["input_ids"], "sampling_params": {**sampling, "n": 2}}
    assert [a["output_ids"] for a in _post(front, samples)] == [first, first]


def test_native_input_logprobs_are_merged(front: str) -> None:
    body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 2}, "return_logprob": True}
    answer = _post(front, {**body, "logprob_start_len": 0})
    logprobs = answer["meta_info"]["input_token_logprobs"]
    assert len(logprobs) == answer["meta_info"]["prompt_tokens"] and logprobs[0][0] is None


def test_errors_keep_their_message(front: str) -> None:
    answer = httpx.post(f"{front}/generate", json={"text": PROMPT, "sampling_params": {"temperature": -1}})
    assert answer.status_code == 400 and "temperature" in answer.text


def test_it_knows_our_workers(front: str) -> None:
    workers = httpx.get(f"{front}/workers").json()["workers"]
    assert sorted(w["worker_type"] for w in workers) == ["decode", "prefill"] and all(w["is_healthy"] for w in workers)
    assert httpx.get(f"{front}/health_generate").status_code == 200


def _post(url: str, body: dict[str, Any]) -> Any:
    response = httpx.post(f"{url}/generate", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()
