"""Other projects' routers (from PyPI) in the place of ours, in front of our workers: the core cases that each has."""

import asyncio
import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from deploy.launcher.probe import free_ports
from tests.e2e.client import assert_all_back, generate_all
from tests.e2e.cluster import Cluster, end_tree, wait_until
from tests.e2e.ranks.leaders import Leader, start_process
from tests.e2e.workload import recall_body

PROMPT = "k17 v42 k03 v91 k17"
CHAT: dict[str, Any] = {"model": "recall", "messages": [{"role": "user", "content": PROMPT}], "temperature": 0}
READY_S = 60.0
PAIR = ("--pd-disaggregation", "--policy", "random")
SGLANG = ("sglang_router.launch_router", "--worker-startup-check-interval", "1", "--log-level", "warn")
SMG = ("smg", "launch", "--worker-startup-check-interval", "1", "--log-level", "warn")
VLLM = ("vllm_router.launch_router", "--worker-startup-check-interval", "1", "--log-level", "warning")
ROUTERS = {  # modules and flags
    "sglang-router, pair": (*SGLANG, *PAIR),
    "sglang-router": SGLANG,
    "smg, pair": (*SMG, *PAIR),
    "smg": SMG,
    "vllm-router": (*VLLM, "--policy", "cache_aware"),
    "vllm-router, pair": (*VLLM, "--vllm-pd-disaggregation", "--policy", "random"),
}
PAIRS = ("sglang-router, pair", "smg, pair")
SERVING = (*PAIRS, "sglang-router", "smg", "vllm-router")  # vLLM's pairs share KV in vLLM's way
SLOW = ("sglang-router", "smg, pair")  # of each project `make test` starts one before a pair or one before a worker


def before(*names: str) -> pytest.MarkDecorator:
    fronts = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in names]
    return pytest.mark.parametrize("front", fronts, indirect=True)


@dataclass(frozen=True)
class Front:
    """A router before the workers of `behind`."""

    name: str
    url: str
    behind: Cluster


@pytest.fixture(scope="module")
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    name: str = request.param
    behind: Cluster = request.getfixturevalue("nixl" if name.endswith("pair") else "unified")
    with other_router(ROUTERS[name], behind, tmp_path_factory.mktemp("other") / "router.log") as url:
        yield Front(name, url, behind)


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
        process.kill()  # they drain for seconds, with nothing to lose
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
def all_back(front: Front) -> Iterator[None]:
    """After each test: every page, row and room."""
    yield
    asyncio.run(assert_all_back(front.behind))


@pytest.fixture
def client(front: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0, timeout=60) as api:
        yield api


@before(*SERVING)
def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT, max_tokens=5)
    assert (answer.choices[0].message.content or "").strip() == "v42" and answer.choices[0].finish_reason == "stop"
    events = list(
        client.chat.completions.create(**CHAT, max_tokens=5, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
    assert text.strip() == "v42" and events[-1].usage is not None and events[-1].usage.completion_tokens == 2


@before(*SERVING)
def test_a_client_that_leaves_ends_its_request(front: Front, client: openai.OpenAI) -> None:
    aborted = total(front, "sglang:num_aborted_requests_total")
    endless: dict[str, Any] = {"max_tokens": 20_000, "temperature": 0, "extra_body": {"ignore_eos": True}}
    with client.completions.create(model="recall", prompt=PROMPT, stream=True, **endless) as stream:
        assert next(iter(stream)).choices[0].text.split()[0] == "v42"
    wait_until(
        lambda: total(front, "sglang:num_aborted_requests_total") > aborted, within_s=READY_S, what="the request ended"
    )


@before(*SERVING)
def test_logprobs_and_a_constraint(client: openai.OpenAI) -> None:
    likely = client.chat.completions.create(**CHAT, max_tokens=1, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert likely is not None and likely.content is not None and len(likely.content[0].top_logprobs) == 2
    answer = client.chat.completions.create(**CHAT, max_tokens=1, extra_body={"regex": " v0[12]"})
    assert answer.choices[0].message.content in (" v01", " v02")


@before("smg, pair", "smg", "vllm-router")
def test_responses_and_messages(front: Front, client: openai.OpenAI) -> None:
    answer = client.responses.create(model="recall", input=PROMPT, temperature=0, max_output_tokens=5, store=False)
    assert answer.output_text.strip() == "v42"
    body = {"model": "recall", "messages": CHAT["messages"], "max_tokens": 5, "temperature": 0}
    message = httpx.post(f"{front.url}/v1/messages", json=body, timeout=60).json()
    assert [block["text"].strip() for block in message["content"]] == ["v42"]


@before("vllm-router")
def test_tokens_of_chats(front: Front, client: openai.OpenAI) -> None:
    """vllm-router asks for them itself, to find the worker that caches the beginning of a chat."""
    rendered = ("sglang:http_responses_total", "/v1/chat/completions/render", '"200"')
    before_it = total(front, *rendered)
    client.chat.completions.create(**CHAT, max_tokens=1)
    assert total(front, *rendered) == before_it + 1
    body = {"model": "recall", "messages": CHAT["messages"]}
    shown, counted = (
        httpx.post(f"{front.url}{path}", json=body).json() for path in ("/v1/chat/completions/render", "/tokenize")
    )
    assert shown["token_ids"] == counted["tokens"] and counted["count"] == 8


def total(front: Front, name: str, *having: str) -> float:
    """A counter's sum over the workers and the series that have these words in their labels."""
    texts = [httpx.get(f"{worker.url}/metrics").text for worker in front.behind.workers]
    lines = [line for text in texts for line in text.splitlines() if line.startswith(name + "{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(word in line for word in having))


@before(*SERVING)
@pytest.mark.parametrize("stream", [False, True])
async def test_native_requests_side_by_side_recall_exactly(front: Front, stream: bool) -> None:
    rng = random.Random(11)
    drawn = [recall_body(rng, rng.randint(5, 250), max_new_tokens=4) for _ in range(24)]
    answers = await generate_all(front.url, [{**body, "stream": stream} for body, _ in drawn])
    assert [a["output_ids"] for a in answers] == [wanted for _, wanted in drawn]


@before(*PAIRS, "sglang-router", "smg")
def test_native_batches_and_samples(front: Front) -> None:
    rng = random.Random(12)
    (one, first), (two, second) = (recall_body(rng, 20, max_new_tokens=3) for _ in range(2))
    sampling = one["sampling_params"]
    body = {"input_ids": [one["input_ids"], two["input_ids"]], "sampling_params": sampling}
    assert [a["output_ids"] for a in generate(front, body)] == [first, second]
    samples = {"input_ids": one["input_ids"], "sampling_params": {**sampling, "n": 2}}
    assert [a["output_ids"] for a in generate(front, samples)] == [first, first]


@before(*PAIRS, "sglang-router", "smg")
def test_native_input_logprobs_are_merged(front: Front) -> None:
    body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 2}, "return_logprob": True}
    answer = generate(front, {**body, "logprob_start_len": 0})
    logprobs = answer["meta_info"]["input_token_logprobs"]
    assert len(logprobs) == answer["meta_info"]["prompt_tokens"] and logprobs[0][0] is None


def generate(front: Front, body: dict[str, Any]) -> Any:
    response = httpx.post(f"{front.url}/generate", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


@before("smg, pair", "smg")
def test_smg_takes_our_workers_for_sglang_s_and_reads_their_load(front: Front) -> None:
    workers = httpx.get(f"{front.url}/workers").json()["workers"]
    assert {worker["runtime_type"] for worker in workers} == {"sglang"}
    for load in httpx.get(f"{front.url}/get_loads").json()["loads"]:
        assert load["max_total_num_tokens"] == 65536 and load["max_running_requests"] == 64


@before("vllm-router, pair")
def test_pairs_of_vllm_s_kind_are_refused_with_the_remedy(front: Front) -> None:
    answer = httpx.post(f"{front.url}/v1/chat/completions", json=CHAT)
    assert answer.status_code == 400 and "kv_transfer_params: " in answer.text and "tandem router" in answer.text
