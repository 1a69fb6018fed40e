"""Latent attention through two workers: pages of latents, with keys of an index or without, cross by NIXL and Mooncake, whole or layer by layer, and come back retracted."""

from pathlib import Path

import pytest

from tests.e2e.ranks.test_rank_pairs import Cell, pair_of
from tests.e2e.two_engines import disaggregated, run, unified
from tests.engine.engine_in_process import prompt_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint

TIGHT = 304  # tokens: what runs is retracted, and comes back from the host
ASKED = [(f"r{i}", prompt_of(70 - 9 * i, i), 44) for i in range(4)]


@pytest.mark.parametrize(("way", "family"), [("nixl", "deepseek_v32"), ("mooncake", "deepseek_v3")])
def test_two_workers_give_the_tokens_of_one(way: str, family: str, tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, family)
    with unified(path, max_total_tokens=8192) as system:
        wanted = run(system, ASKED, turns_between=6)
    disagg = {
        "disaggregation_transfer_backend": way,
        "disaggregation_kv_checksum": True,
        "disaggregation_layerwise_transfer": "on" if way == "mooncake" else "off",
        "disaggregation_decode_retraction_backup": "host",
    }
    flags: dict[str, object] = {
        "max_total_tokens": 8192,
        "chunked_prefill_size": 32,
        "schedule_conservativeness": 0.0,
        "disagg": disagg,
    }
    decode_flags: dict[str, object] = {"max_total_tokens": TIGHT} if way == "nixl" else {}
    with disaggregated(path, decode=decode_flags, **flags) as pair:
        assert run(pair, ASKED, together=len(ASKED), turns_between=6) == wanted
        decode = pair.workers[-1]
        assert decode.role.counters()["kv_checksum_verified"] == len(ASKED)
        assert (decode.parts.scheduler.counters.retractions > 0) == (way == "nixl")


def test_each_rank_has_all_latents(tmp_path: Path) -> None:
    """Two ranks of prefill, one of decode: heads are cut, latents are not, and cross once."""
    path = make_tiny_checkpoint(tmp_path, "deepseek_v3")
    with unified(path, max_total_tokens=8192) as system:
        wanted = run(system, ASKED, turns_between=6)
    flags = {"max_total_tokens": 8192, "chunked_prefill_size": 32, "num_threads": 1, "schedule_conservativeness": 0.0}
    cell = Cell("nixl", (2, 1), (1, 1), "on", "prefill")
    with pair_of(cell, path, flags=flags, decode={"max_total_tokens": TIGHT}) as pair:
        assert run(pair, ASKED, together=len(ASKED), turns_between=6) == wanted
        decode = pair.workers[-1]
        assert decode.role.counters()["resumed_through_prefill"] > 0
