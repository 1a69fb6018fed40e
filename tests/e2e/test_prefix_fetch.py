"""A prefix that one worker has is not computed by another one: real processes, bytes over NIXL (over Mooncake: shared/test_prefixes.py)."""

from collections.abc import Iterator

import pytest

from tests.e2e.client import assert_all_back, state_of
from tests.e2e.cluster import SHIPPED, Cluster, cluster
from tests.e2e.turns import MOST_TALKS, PAGE, ask_pair, assert_found_again, conversation

SECRET = "only this cluster knows it"
EVENTS = '{"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}'


@pytest.fixture(scope="module")
def pd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("prefixes")
    secret = folder / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    flags = (
        *("--prefill", "2", "--transfer-backend", "nixl", "--prefill-policy", "cache_aware"),
        *("--prefix-fetch", "--kv-events-config", EVENTS, "--disaggregation-kv-checksum"),
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
