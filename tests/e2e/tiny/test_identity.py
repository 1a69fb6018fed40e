"""The same tokens from every way to serve: one engine at depth 1, unified at depth 2, mixed, multiplexed, over NIXL and over Mooncake.

Random weights in fp32, so that every layer's every KV slot matters and nothing ties.
"""

from collections.abc import Iterator

import pytest

from tests.e2e.client import assert_all_back, generate_all
from tests.e2e.cluster import Cluster, cluster
from tests.e2e.settings import settings
from tests.e2e.workload import mixed_bodies
from tests.engine.engine_in_process import tokens_of

MODEL = ("--max-total-tokens", "65536", "--chunked-prefill-size", "128", "--log-level", "warning")
OVERLAP = ("--stream", "threaded")
OTHERS = {  # besides the clusters of this folder
    "mixed": ("--unified", "--enable-mixed-chunk", "--schedule-policy", "lpm", *OVERLAP),
    "multiplexed": ("--unified", "--enable-pdmux", "--pdmux-itl", "0.05"),
    "mooncake": ("--transfer-backend", "mooncake", "--page-size", "4"),
}


def tokens(answers: list[dict]) -> list[list[int]]:  # type: ignore[type-arg]
    return [answer["output_ids"] for answer in answers]


@pytest.fixture(scope="module")
def reference(qwen3: str) -> list[list[int]]:
    """One engine at depth 1."""
    return tokens_of(qwen3, mixed_bodies(seed=1), depth=1, max_total_tokens=65536)


@pytest.fixture(
    scope="module", params=["unified", "pd", *(pytest.param(way, marks=pytest.mark.slow) for way in OTHERS)]
)
def way(request: pytest.FixtureRequest, qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if request.param not in OTHERS:
        yield request.getfixturevalue(request.param)
        return
    folder, env = tmp_path_factory.mktemp(request.param), settings(stream_delay_s=0.001)
    with cluster(folder, *OTHERS[request.param], "--model-path", qwen3, *MODEL, env=env) as c:
        yield c


async def test_64_mixed_requests_give_identical_tokens(way: Cluster, reference: list[list[int]]) -> None:
    """Twice: the second time the prefixes are cached."""
    assert len({tuple(t) for t in reference}) > 50, "the workload does not tell requests apart"
    for _ in range(2):
        answers = await generate_all(way.router, mixed_bodies(seed=1))
        assert tokens(answers) == reference
        await assert_all_back(way)
