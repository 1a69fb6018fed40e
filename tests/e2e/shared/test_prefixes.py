"""Prefixes of other workers over Mooncake, as a router names them."""

from tests.e2e.client import assert_all_back, state_of
from tests.e2e.cluster import Cluster
from tests.e2e.shared.conftest import SECRET
from tests.e2e.turns import assert_found_again


async def test_prefill_gets_answers_of_earlier_turns_from_decode(mooncake: Cluster) -> None:
    (decode,) = mooncake.of("decode")
    before = (await state_of(decode.url))["counters"]
    await assert_found_again(mooncake.of("prefill"), decode, secret=SECRET.encode())
    after = (await state_of(decode.url))["counters"]
    assert after["prefixes_sent"] >= before["prefixes_sent"] + 2
    await assert_all_back(mooncake)
