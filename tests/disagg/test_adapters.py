"""Adapters through both roles: decode gives no memory to a request whose adapter has no place, and lets others pass."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.hash_model import expected_tokens
from tests.disagg.two_roles import Cluster


def test_decode_skips_requests_without_a_place() -> None:
    cluster = Cluster(pages=(200, 200), depth=2, rows=8, places=1)
    rng = random.Random(3)
    cluster.submit("a", [9, 9, 1], 1, new=100, adapter=1)
    while "a" not in cluster.decode.tokens:
        cluster.turn(rng)
    for i, (rid, adapter) in enumerate([("b", 2), ("a2", 1), ("model", 0)], 2):
        cluster.submit(rid, [9, 9, i], i, new=4, adapter=adapter)
    cluster.run(rng)
    ends = list(cluster.decode.finish)
    assert ends.index("b") > ends.index("a") and ends.index("model") < ends.index("a")
    assert cluster.decode.tokens["b"] == expected_tokens([9, 9, 2], 4, adapter=2)
    cluster.assert_all_back()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 2),
    places=st.integers(1, 2),
    pages=st.tuples(st.integers(16, 40), st.integers(16, 40)),
    kept=st.sampled_from([{}, {"backup_pages": 100}, {"resume_elsewhere": True}]),
)
def test_tokens_cross_in_batches_of_any_content(
    seed: int, depth: int, places: int, pages: tuple[int, int], kept: dict[str, int]
) -> None:
    """Two adapters and the model on shared prompts, memory short on either side, retractions."""
    rng = random.Random(seed)
    cluster = Cluster(pages=pages, depth=depth, places=places, lora_drain_wait_s=rng.choice([None, 0.0]), **kept)
    asked = {}
    for i in range(8):
        prompt = [5, 5, 5, 5, 5, 5, 5, 5][: rng.randint(1, 8)] + [i] * rng.randint(0, 3)
        asked[f"r{i}"] = prompt, rng.randint(2, 14), rng.randint(0, 3)
        cluster.submit(f"r{i}", prompt, i + 1, new=asked[f"r{i}"][1], adapter=asked[f"r{i}"][2])
    cluster.run(rng)
    assert cluster.decode.tokens == {rid: expected_tokens(p, n, adapter=a) for rid, (p, n, a) in asked.items()}
    cluster.assert_all_back()
