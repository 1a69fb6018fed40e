"""A prefix that one worker has is not computed by another one: real processes, bytes over NIXL (over Mooncake: shared/test_prefixes.py)."""

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from engine.model_files.model_config import DEFAULT_MODEL_PATH
from tests.e2e.client import assert_all_back, generate_all, post, session, state_of
from tests.e2e.cluster import SHIPPED, Cluster, Worker, cluster
from tests.e2e.shared.test_kv_events import body, wait_until_they_agree
from tests.e2e.turns import MOST_TALKS, PAGE, Turn, ask_pair, assert_found_again, conversation
from tests.engine.engine_in_process import prompt_of
from tests.lora.tiny_adapters import make_tiny_adapter

SECRET = "only this cluster knows it"
Ask = Callable[..., Awaitable[tuple[list[int], int]]]  # tokens, and how many of the prompt were cached
EVENTS = '{"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}'


@pytest.fixture(scope="module")
def pd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("prefixes")
    secret = folder / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    flags = (
        *("--prefill", "2", "--transfer-backend", "nixl", "--prefill-policy", "cache_aware"),
        *("--prefix-fetch", "--enable-lora", "--kv-events-config", EVENTS, "--disaggregation-kv-checksum"),
        *("--cluster-secret-file", str(secret), *SHIPPED),
    )
    with cluster(folder, *flags) as pd:
        yield pd


async def test_answers_of_earlier_turns_come_from_decode(pd: Cluster) -> None:
    (decode,) = pd.of("decode")
    await assert_found_again(pd.of("prefill"), decode, secret=SECRET.encode())
    assert (await state_of(decode.url))["counters"]["prefixes_sent"] >= 2
    await assert_all_back(pd)


async def test_a_prefill_worker_gets_what_another_has_computed(pd: Cluster) -> None:
    """Decode has the answer, too, but prefill is told of the other one alone."""
    (one, other), (decode,) = pd.of("prefill"), pd.of("decode")
    for seed in range(100, 100 + MOST_TALKS):
        first, second, _ = conversation(seed)
        await ask_pair(one, decode, first, known=0, secret=SECRET.encode())
        known = len(first.prompt)
        answer = await ask_pair(other, decode, second, known=known, secret=SECRET.encode(), source=one)
        assert answer["output_ids"] == second.answer
        if known - PAGE < answer["meta_info"]["cached_tokens"] <= known:
            break
    else:
        raise AssertionError(f"the prefix was computed again: {answer['meta_info']}")
    assert (await state_of(one.url))["counters"]["prefixes_sent"] >= 1
    await assert_all_back(pd)


async def change(url: str, what: str, **fields: str) -> None:
    async with session() as http:
        status, answer = await post(http, f"{url}/{what}_lora_adapter", {"lora_name": "law", **fields})
    assert status == 200, answer


async def test_kv_of_an_adapter_is_found_and_fetched_by_its_weights(pd: Cluster, tmp_path: Path) -> None:
    (one, other), (decode,) = pd.of("prefill"), pd.of("decode")
    first, second = (
        make_tiny_adapter(tmp_path / str(seed), DEFAULT_MODEL_PATH, seed=seed, layers=(0, 1)) for seed in (1, 2)
    )
    await change(pd.router, "load", lora_path=first)

    async def ask(prefill: Worker, prompt: list[int], known: int = 0) -> tuple[list[int], int]:
        turn = Turn(prompt, [0] * 8)  # the answer is not known
        answer = await ask_pair(prefill, decode, turn, known=known, secret=SECRET.encode(), source=one, lora="law")
        return answer["output_ids"], answer["meta_info"]["cached_tokens"]

    prompts = [prompt_of(600, seed) for seed in range(MOST_TALKS)]
    answers = [(await ask(one, prompt))[0] for prompt in prompts]
    await wait_until_they_agree(pd)
    bodies = [body(prompt) | {"lora_path": "law"} for prompt in prompts]
    routed = [(await generate_all(pd.router, [asked]))[0]["meta_info"]["cached_tokens"] for asked in bodies]
    assert min(routed) >= 512, "the router did not know"
    fetched = [await ask(other, prompt, known=600) for prompt in prompts]
    assert [found for found, _ in fetched] == answers
    assert max(cached for _, cached in fetched) > 600 - PAGE, "computed again"
    await _with_other_weights(ask, one, other, decode, second, prompts[0], answers[0])
    await change(pd.router, "unload")
    await assert_all_back(pd)


async def _with_other_weights(
    ask: Ask, one: Worker, other: Worker, decode: Worker, path: str, prompt: list[int], old: list[int]
) -> None:
    """Loaded under the same name, not yet at `one`, which is named as the source."""
    for worker in (other, decode):
        await change(worker.url, "unload")
        await change(worker.url, "load", lora_path=path)
    refused = (await state_of(one.url))["counters"]["prefixes_refused"]
    answer, cached = await ask(other, prompt, 600)
    assert cached == 0 and answer != old
    assert (await state_of(one.url))["counters"]["prefixes_refused"] == refused + 1
    await change(one.url, "unload")
    await change(one.url, "load", lora_path=path)
    assert await ask(one, prompt) == (answer, 0)
