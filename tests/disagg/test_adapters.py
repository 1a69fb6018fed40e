"""Adapters through both roles: decode gives no memory to a request whose adapter has no place, and lets others pass."""

import random

from tests.core.hash_model import expected_tokens
from tests.disagg.two_roles import Cluster


def test_decode_skips_requests_without_a_place() -> None:
    cluster = Cluster(pages=(200, 200), depth=2, rows=8, both={"max_loras_per_batch": 1})
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
