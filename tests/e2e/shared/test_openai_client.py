"""The `openai` client (and native /generate) against the router: PD answers equal a unified worker's, field by field.

What the prefill worker alone knows (the prompt's logprobs, the cached tokens) must have been merged in by the router.
"""

import asyncio
import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.e2e.client import assert_all_back
from tests.e2e.cluster import Cluster
from tools.recall import vocab

PROMPT = "k17 v42 k03 v91 k17"
IDS = vocab.encode(PROMPT)
TIME_LINE = ("bootstrap_time", "queue_time", "prefill_time", "transfer_time", "decode_time")
VOLATILE = ("id", "created", "e2e_latency", "cached_tokens", "first_token_latency", "decode_throughput", *TIME_LINE)
USER = [{"role": "user", "content": PROMPT}]
GREEDY = {"model": "default", "temperature": 0}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": PROMPT, "max_tokens": 3},
    "ids": {"prompt": IDS, "max_tokens": 3},
    "texts": {"prompt": [PROMPT, "k01 v02 k01", "k05"], "max_tokens": 2},
    "lists-of-ids": {"prompt": [IDS, IDS[:-2]], "max_tokens": 2},
    "n": {"prompt": PROMPT, "max_tokens": 2, "n": 3},
    "texts-n": {"prompt": [PROMPT, "k01 v02 k01"], "max_tokens": 2, "n": 2},
    "logprobs": {"prompt": PROMPT, "max_tokens": 3, "logprobs": 2},
    "echo": {"prompt": PROMPT, "max_tokens": 3, "echo": True},
    "echo-logprobs": {"prompt": PROMPT, "max_tokens": 3, "echo": True, "logprobs": 2},
    "echo-logprobs-0": {"prompt": PROMPT, "max_tokens": 3, "echo": True, "logprobs": 0},
    "echo-logprobs-ids": {"prompt": IDS, "max_tokens": 2, "echo": True, "logprobs": 1},
    "echo-logprobs-texts-n": {"prompt": [PROMPT, "k01 v02 k01"], "max_tokens": 2, "n": 2, "echo": True, "logprobs": 1},
    "score": {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 2},
    "score-texts": {"prompt": [PROMPT, "k01 v02 k01"], "max_tokens": 0, "echo": True, "logprobs": 1},
    "stop": {"prompt": PROMPT, "max_tokens": 8, "stop": ["v91"]},
    "stop-regex": {"prompt": PROMPT, "max_tokens": 8, "extra_body": {"stop_regex": r"v9\d"}},
    "stop-at-once": {"prompt": PROMPT, "max_tokens": 8, "stop": ["v42"]},
    "long-echo": {"prompt": " ".join(f"k{i:02d} v{i:02d}" for i in range(250)), "max_tokens": 1, "echo": True}
    | {"logprobs": 1},
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": USER, "max_tokens": 1},
    "eos": {"messages": USER},
    "logprobs": {"messages": USER, "max_tokens": 3, "logprobs": True, "top_logprobs": 2},
    "n": {"messages": USER, "max_tokens": 2, "n": 2, "logprobs": True},
    "stop": {"messages": USER, "stop": "v42"},
}
SEEDED = {"prompt": PROMPT, "max_tokens": 12, "temperature": 40.0, "extra_body": {"ignore_eos": True}}


def whole_and_in_streams(names: Iterable[str]) -> pytest.MarkDecorator:
    """Each as a whole answer or as a stream, in turn; `make slow-tests` tries the other way."""
    cells = [
        pytest.param(name, stream, id=f"{name}-{'stream' if stream else 'whole'}", marks=marks)
        for number, name in enumerate(names)
        for stream, marks in ((number % 2 == 0, ()), (number % 2 == 1, pytest.mark.slow))
    ]
    return pytest.mark.parametrize(("name", "stream"), cells)


@pytest.fixture(scope="module")
def apis(nixl: Cluster, unified: Cluster) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    """(through the router, the unified worker)."""
    with _client(nixl) as pd, _client(unified) as plain:
        yield pd, plain


def _client(c: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{c.router}/v1", api_key="any", max_retries=0, timeout=60)


def lasting(value: Any) -> Any:
    """`value` without what differs between any two requests; numbers rounded to what batches may change."""
    if isinstance(value, dict):
        return {k: lasting(v) for k, v in value.items() if k not in VOLATILE}
    if isinstance(value, list):
        return [lasting(v) for v in value]
    return round(value, 3) if isinstance(value, float) else value


def joined(events: list[Any]) -> Any:
    """A stream as one answer a choice, so that it does not matter which tokens came together."""
    whole: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event.choices):
        flat = {**choice.model_dump(), **choice.model_dump().get("delta", {})}
        into = whole.setdefault(choice.index, {})
        for name in ("text", "content", "finish_reason", "logprobs"):
            into[name] = _plus(into.get(name), flat.get(name))
    return {"choices": whole, "usage": events[-1].usage.model_dump()}


def _plus(a: Any, b: Any) -> Any:
    if isinstance(a, dict) and isinstance(b, dict):
        return {k: _plus(a.get(k), b.get(k)) for k in {**a, **b}}
    return b if a is None else a if b is None else a + b


def answer(create: Any, asked: dict[str, Any], *, stream: bool) -> Any:
    if stream:
        return joined(list(create(**GREEDY, **asked, stream=True, stream_options={"include_usage": True})))
    return create(**GREEDY, **asked).model_dump()


@whole_and_in_streams(COMPLETIONS)
def test_completions_equal_the_unified_ones(apis: tuple[openai.OpenAI, openai.OpenAI], name: str, stream: bool) -> None:
    pd, plain = (answer(api.completions.create, COMPLETIONS[name], stream=stream) for api in apis)
    assert lasting(pd) == lasting(plain)


@whole_and_in_streams(CHATS)
def test_chats_equal_the_unified_ones(apis: tuple[openai.OpenAI, openai.OpenAI], name: str, stream: bool) -> None:
    pd, plain = (answer(api.chat.completions.create, CHATS[name], stream=stream) for api in apis)
    assert lasting(pd) == lasting(plain)


def test_the_answers_are_the_right_ones(apis: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    """Equal could be equally wrong."""
    pd = apis[0]
    answer = pd.completions.create(**GREEDY, prompt=PROMPT, max_tokens=3, echo=True, logprobs=1).choices[0]
    assert answer.text == "k17 v42 k03 v91 k17 v42 k03 v91" and answer.logprobs is not None
    first, *others = answer.text.split()
    assert answer.logprobs.tokens == ["<bos>", first, *(f" {word}" for word in others)], "as they stand in the text"
    assert answer.logprobs.text_offset == [0, *(4 * i - (i > 0) for i in range(len(others) + 1))]
    assert answer.logprobs.token_logprobs is not None and answer.logprobs.token_logprobs[0] is None
    assert answer.logprobs.token_logprobs[-3:] == pytest.approx([0, 0, 0], abs=0.01)
    regex: Any = {"prompt": PROMPT, "max_tokens": 8, "extra_body": {"stop_regex": ["nothing", r"k\d3 v9\d"]}}
    answer = pd.completions.create(**GREEDY, **regex).choices[0]
    assert (answer.text, answer.finish_reason) == (" v42 ", "stop") and answer.matched_stop == r"k\d3 v9\d"  # type: ignore[attr-defined]
    regex["extra_body"]["no_stop_trim"] = True
    events = list(pd.completions.create(**GREEDY, **regex, stream=True))
    assert "".join(event.choices[0].text for event in events) == " v42 k03 v91"
    chat = pd.chat.completions.create(**GREEDY, messages=USER, logprobs=True)
    assert chat.choices[0].finish_reason == "stop" and (chat.choices[0].message.content or "").strip() == "v42"
    assert chat.usage is not None and chat.usage.prompt_tokens > len(IDS)


def test_replicas_have_seeds_of_their_own(mooncake: Cluster) -> None:
    """Otherwise two of them would give the same request the same sample."""
    seeds = [httpx.get(f"{worker.url}/server_info").json()["random_seed"] for worker in mooncake.workers]
    assert len(set(seeds)) == len(seeds) == 3 and None not in seeds


def test_equal_seeds_draw_equally(apis: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    """So hot that all words are about equally likely: the seed alone decides, in prefill's first draw and in decode's others."""

    def draw(api: openai.OpenAI, seed: int, n: int = 1) -> list[str]:
        return [c.text for c in api.completions.create(model="default", seed=seed, n=n, **SEEDED).choices]

    pd, plain = apis
    drawn = {seed: draw(pd, seed) for seed in (1, 2, 3)}
    assert len({*map(str, drawn.values())}) == 3
    assert all(draw(pd, seed) == text == draw(plain, seed) for seed, text in drawn.items())
    samples = draw(pd, 7, n=3)
    assert len(set(samples)) == 3 and samples == draw(plain, 7, n=3)


def test_unknown_models_and_long_prompts(apis: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    pd = apis[0]
    with pytest.raises(openai.NotFoundError) as unknown:
        pd.completions.create(model="gpt-4", prompt=PROMPT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        pd.completions.create(model="default", prompt=[20] * 33_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as answer:
        pd.chat.completions.create(model="default", messages=[USER[0]], max_tokens=32_768)  # type: ignore[list-item]
    assert answer.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as text:
        pd.embeddings.create(model="default", input=[20] * 33_000)
    for refused in (long.value, answer.value, text.value):
        assert "This model's maximum context length is 32768 tokens. However, " in refused.message
        assert refused.code == "context_length_exceeded"


NATIVE: dict[str, dict[str, Any]] = {
    "single": {"text": PROMPT},
    "ids": {"input_ids": IDS},
    "batch": {"text": [PROMPT, "k01 v02 k01"]},
    "batch-of-ids": {"input_ids": [IDS, IDS[:-2]], "logprob_start_len": [0, 2]},
    "from-the-middle": {"text": PROMPT, "logprob_start_len": 3},
    "output-only": {"text": PROMPT, "logprob_start_len": -1},
    "some-of-a-batch": {"text": [PROMPT, "k01 v02 k01"], "return_logprob": [True, False], "top_logprobs_num": [1, 0]},
    "texts": {"text": PROMPT, "return_text_in_logprobs": True},
}


@whole_and_in_streams(NATIVE)
def test_native_logprobs_equal_the_unified_ones(nixl: Cluster, unified: Cluster, name: str, stream: bool) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 3}
    body = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "stream": stream, **NATIVE[name]}
    pd, plain = (_native(c, {**body, "sampling_params": sampling}) for c in (nixl, unified))
    assert lasting(pd) == lasting(plain)
    if name == "single":
        logprobs = pd[0]["meta_info"]["input_token_logprobs"]
        assert [token for _, token, _ in logprobs] == IDS and logprobs[0][0] is None


def _native(c: Cluster, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers; of a stream, each sample's last event."""
    response = httpx.post(f"{c.router}/generate", json=body, timeout=60)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        whole = response.json()
        return whole if isinstance(whole, list) else [whole]
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return [event for _, event in sorted({e.pop("index", 0): e for e in events}.items())]


def test_everything_is_back(nixl: Cluster) -> None:
    asyncio.run(assert_all_back(nixl))
