"""Clusters of a tiny random model that the files of this folder share: one worker, and a pair over NIXL, both at depth 2.

A test may pause them or load other weights; it leaves them as it found them.
"""

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.cluster import Cluster, cluster
from tests.e2e.settings import settings
from tests.lora.tiny_adapters import make_tiny_adapter

COMMON = (
    *("--max-total-tokens", "65536", "--chunked-prefill-size", "64", "--log-level", "warning"),
    *("--stream", "threaded"),
    *("--constrained-json-disable-any-whitespace", "--tool-call-parser", "qwen25", "--enable-return-hidden-states"),
    *("--reasoning-parser", "qwen3"),
)


def delayed() -> dict[str, str]:
    return settings(stream_delay_s=0.004)


@pytest.fixture(scope="package")
def unified(qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("unified"), "--unified", "--model-path", qwen3, *COMMON, env=delayed()) as c:
        yield c


@pytest.fixture(scope="package")
def adapters(qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of LoRA adapters by name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: make_tiny_adapter(folder / name, qwen3, seed=seed)
        for seed, name in enumerate(("one", "two", "three"), start=1)
    }


@pytest.fixture(scope="package")
def pd(qwen3: str, adapters: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Layers leave as they are computed. Adapter "one" from the start; two in a batch."""
    way = ("--transfer-backend", "nixl", "--disaggregation-layerwise-transfer", "on")
    lora = ("--lora-paths", f"one={adapters['one']}", "--max-loras-per-batch", "2", "--max-loaded-loras", "3")
    args = (*way, *lora, "--model-path", qwen3, *COMMON)
    with cluster(tmp_path_factory.mktemp("pd"), *args, env=delayed()) as c:
        yield c


@pytest.fixture(scope="module", params=["unified", "pd"])
def way(request: pytest.FixtureRequest) -> Cluster:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture
def client(way: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{way.router}/v1", api_key="none", max_retries=0, timeout=60) as c:
        yield c
