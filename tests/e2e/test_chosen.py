"""Logprobs of chosen ids, hidden states, embeddings and decode's retraction: the same through two workers as through one."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest

from tests.e2e.client import assert_all_back, generate, generate_all, post, session, state_of, wait_for_state
from tests.e2e.cluster import Cluster, cluster
from tests.models.tiny_checkpoints import make_tiny_checkpoint

FLAGS = ("--chunked-prefill-size", "64", "--log-level", "warning", "--enable-return-hidden-states")
SMALL = ("--max-total-tokens", "640", "--num-reserved-decode-tokens", "0", "--schedule-conservativeness", "0")
DISAGGREGATED = (
    *("--disaggregation-decode-retraction-backup", "host", "--stream", "threaded", "--stream-delay", "0.001"),
    "--enable-priority-scheduling",
)
MAX_ERROR = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def unified(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("unified"), "--unified", "--model-path", checkpoint, *FLAGS) as c:
        yield c


@pytest.fixture(scope="module")
def pd(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Memory for few answers at a time, and no reserve: decode retracts. Priorities count."""
    args = ("--model-path", checkpoint, *FLAGS, *SMALL, *DISAGGREGATED)
    with cluster(tmp_path_factory.mktemp("pd"), *args) as c:
        yield c


def ids_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 272) for _ in range(length)]


def both(unified: Cluster, pd: Cluster, bodies: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    answers = [asyncio.run(generate_all(c.router, bodies)) for c in (unified, pd)]
    asyncio.run(assert_all_back(pd))
    return answers[0], answers[1]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_chosen_ids_and_hidden_states(unified: Cluster, pd: Cluster, stream: bool) -> None:
    body = {
        "input_ids": ids_of(150, 1),
        "sampling_params": {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 2,
        "token_ids_logprob": [270, 20],
        "return_hidden_states": True,
        "stream": stream,
    }
    (one,), (two,) = both(unified, pd, [body])
    assert one["output_ids"] == two["output_ids"]
    for name, count in (("input_token_ids_logprobs", 148), ("output_token_ids_logprobs", 5)):
        rows, expected = two["meta_info"][name], one["meta_info"][name]
        assert len(rows) == count and [[e[1] for e in row] for row in rows] == [[270, 20]] * count
        for row, expected_row in zip(rows, expected, strict=True):
            assert [e[0] for e in row] == pytest.approx([e[0] for e in expected_row], abs=MAX_ERROR)
    ours, theirs = two["meta_info"]["hidden_states"], one["meta_info"]["hidden_states"]
    assert len(ours) == len(theirs) == 5 and len(ours[0]) == 150
    for got, expected in zip([*ours[0], *ours[1:]], [*theirs[0], *theirs[1:]], strict=True):
        assert got == pytest.approx(expected, abs=MAX_ERROR) and len(got) == 64


def test_embeddings_by_the_openai_client(unified: Cluster, pd: Cluster) -> None:
    inputs: list[Any] = ["hello", ["hello", "there"], ids_of(90, 5), [ids_of(90, 5), ids_of(3, 6)]]
    vectors: list[list[list[float]]] = []
    for c in (unified, pd):
        with openai.OpenAI(base_url=f"{c.router}/v1", api_key="none") as client:
            answers = [client.embeddings.create(model="default", input=i) for i in inputs]  # base64 inside
            plain = client.embeddings.create(model="default", input="hello", encoding_format="float")
        assert answers[2].usage.prompt_tokens == 90 and [len(a.data) for a in answers] == [1, 2, 1, 2]
        assert plain.data[0].embedding == pytest.approx(answers[0].data[0].embedding)
        vectors.append([d.embedding for a in answers for d in a.data])
        assert sum(x * x for x in vectors[-1][0]) == pytest.approx(1.0, abs=MAX_ERROR)
    for got, expected in zip(vectors[1], vectors[0], strict=True):
        assert got == pytest.approx(expected, abs=MAX_ERROR)
    asyncio.run(assert_all_back(pd))


def test_decode_retracts_to_the_host_and_nobody_can_tell(unified: Cluster, pd: Cluster) -> None:
    bodies = [
        {
            "input_ids": ids_of(30 + i, 100 + i),
            "sampling_params": {"temperature": 0, "max_new_tokens": 160, "ignore_eos": True},
        }
        for i in range(8)
    ]
    one, two = both(unified, pd, bodies)
    assert [a["output_ids"] for a in two] == [a["output_ids"] for a in one]
    assert sum(a["meta_info"]["num_retractions"] for a in two) > 0
    counters = asyncio.run(decode_counters(pd))
    assert counters["backup_restored_tokens"] == counters["backup_saved_tokens"] > 0


def test_decode_keeps_the_order_of_priorities(unified: Cluster, pd: Cluster) -> None:
    """Memory for one of them at a time. "low" runs when the others arrive, in the order of a dict."""
    wanted = {"low": (0, 30, 500), "poor": (0, 200, 150), "mean": (5, 200, 150), "high": (50, 200, 150)}
    bodies = {
        name: {
            "input_ids": ids_of(length, length + priority + new),
            "priority": priority,
            "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
        }
        for name, (priority, length, new) in wanted.items()
    }
    before = asyncio.run(decode_counters(pd))
    ended, answers = asyncio.run(while_decode_pauses(pd, bodies))
    assert ended == ["high", "mean", "low", "poor"]
    assert asyncio.run(decode_counters(pd))["preemptions"] - before["preemptions"] == 1
    expected = asyncio.run(generate_all(unified.router, list(bodies.values())))
    assert [answers[name]["output_ids"] for name in bodies] == [a["output_ids"] for a in expected]
    asyncio.run(assert_all_back(pd))


async def while_decode_pauses(c: Cluster, bodies: dict[str, dict[str, Any]]) -> tuple[list[str], dict[str, Any]]:
    """The first body runs when decode is paused; the others arrive one by one, then all go on. In which order they ended."""
    decode, ended, answers = c.of("decode")[0].url, list[str](), dict[str, Any]()

    async def ask(http: aiohttp.ClientSession, name: str) -> None:
        answers[name] = await generate(http, c.router, bodies[name])
        ended.append(name)

    async with session() as http, asyncio.TaskGroup() as tasks:
        first, *others = bodies
        tasks.create_task(ask(http, first))
        await wait_for_state(decode, lambda state: state["running"] == 1)
        assert (await post(http, f"{decode}/pause_generation", {"mode": "in_place"}))[0] == 200
        for count, name in enumerate(others, start=1):
            tasks.create_task(ask(http, name))
            await wait_for_state(decode, lambda state, count=count: state["queues"]["held"] == count)
        assert (await post(http, f"{decode}/continue_generation", {}))[0] == 200
    return ended, answers


async def decode_counters(c: Cluster) -> dict[str, float]:
    return (await state_of(c.of("decode")[0].url))["counters"]  # type: ignore[no-any-return]


REFUSED = [
    ("/generate", {"token_ids_logprob": [272]}, "token_ids_logprob"),
    ("/generate", {"token_ids_logprob": [-1]}, "token_ids_logprob"),
    ("/generate", {"token_ids_logprob": [16] * 129}, "token_ids_logprob"),
    ("/generate", {"token_ids_logprob": [16, [17]]}, "token_ids_logprob"),
    ("/generate", {"token_ids_logprob": [[16], [17]]}, "token_ids_logprob"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": ["a", [1]]}, "input"),
    ("/v1/embeddings", {"input": [300]}, "input"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "dimensions": 8}, "dimensions"),
]


def test_what_cannot_be_is_a_400_that_names_the_field(pd: Cluster) -> None:
    async def ask() -> None:
        async with session() as http:
            for path, body, field in REFUSED:
                full = {"text": "a", "return_logprob": True, **body} if path == "/generate" else body
                status, answer = await post(http, pd.router + path, full)
                assert status == 400 and answer["error"]["param"] == field, (body, answer)

    asyncio.run(ask())
    asyncio.run(assert_all_back(pd))
