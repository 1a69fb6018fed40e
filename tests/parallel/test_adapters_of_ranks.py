"""Adapters on ranks: cut as their matrices, they change what one rank's would change."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.lora.bank import AdapterBank, Run, SlicedAdapters
from engine.lora.weights import AdapterWeights, read_adapter
from service.flags import ConfigError
from tests.lora.tiny_adapters import make_tiny_adapter
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.parallel.rank_steps import RankSteps, by_ranks

PROMPT = list(range(20, 60))
ADAPTED = slice(10, 30)  # rows of the prompt


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model with KV heads that four ranks share, and an adapter of all its matrices."""
    folder = tmp_path_factory.mktemp("adapters")
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 128}
    path = make_tiny_checkpoint(folder / "model", "qwen3", dtype="bfloat16", **sizes)
    return path, make_tiny_adapter(folder / "adapter", path, seed=1)


def read(steps: RankSteps, adapter: str, *, dtype: torch.dtype, max_rank: int | None = None) -> AdapterWeights:
    sites = [site.shape for site in steps.model.linear_sites()]
    cpu, elsewhere = torch.device("cpu"), steps.model.other_sites()
    return read_adapter(adapter, sites, dtype=dtype, device=cpu, elsewhere=elsewhere, max_rank=max_rank)


def logits(paths: tuple[str, str], tp_size: int, *, dtype: str, adapted: bool = True, reduce_units: int = 0) -> Tensor:
    def run(steps: RankSteps) -> Tensor | None:
        computed = SlicedAdapters()
        bank = AdapterBank(computed)
        bank.attach(steps.model.linear_sites())
        bank.add(1, read(steps, paths[1], dtype=getattr(torch, dtype)))
        computed.begin([Run(1, ADAPTED)] if adapted else [], recorded=None)
        return steps.logits(steps.step({0: PROMPT}))

    first, *others = by_ranks(paths[0], tp_size, run, dtype=dtype, reduce_units=reduce_units)
    assert first is not None and others == [None] * (tp_size - 1)
    return first


@pytest.mark.parametrize(("dtype", "reduce_units"), [("float32", 0), ("bfloat16", 0), ("bfloat16", 4)])
def test_adapters_on_ranks_change_what_they_change_on_one(
    paths: tuple[str, str], dtype: str, reduce_units: int
) -> None:
    alone = logits(paths, 1, dtype=dtype, reduce_units=reduce_units)
    exact = logits(paths, 1, dtype="float32")
    plain = logits(paths, 1, dtype=dtype, adapted=False, reduce_units=reduce_units)
    bound = 1e-4 * float(exact.abs().max()) if dtype == "float32" else 2.0 * float((alone - exact).abs().max())
    assert float((plain - alone).abs()[ADAPTED].max()) > 2 * bound, "the adapter changes little"
    for tp_size in (2, 4):
        assert float((logits(paths, tp_size, dtype=dtype, reduce_units=reduce_units) - alone).abs().max()) <= bound


def test_ranks_hold_a_matrix_of_an_adapter_once(paths: tuple[str, str]) -> None:
    """A column-parallel layer's A and a row-parallel layer's B are on each rank; the other half of each is cut."""
    whole = by_ranks(paths[0], 1, lambda steps: read(steps, paths[1], dtype=torch.float32))[0]
    ranks = by_ranks(paths[0], 2, lambda steps: read(steps, paths[1], dtype=torch.float32))
    for index, site in enumerate(whole.sites):
        own = [rank.sites[index] for rank in ranks]
        assert site is not None and own[0] is not None and own[1] is not None
        for n, (_, _, b) in enumerate(site.parts):
            a_parts, b_parts = [half.a for half in own], [half.parts[n][2] for half in own]  # type: ignore[union-attr]
            if index % 2:  # o and down
                assert torch.equal(torch.cat(a_parts, 1), site.a) and all(torch.equal(half, b) for half in b_parts)
            else:
                assert all(torch.equal(half, site.a) for half in a_parts) and torch.equal(torch.cat(b_parts, 1), b)


def test_stages_read_their_layers_and_refuse_alike(paths: tuple[str, str], tmp_path: Path) -> None:
    adapter = make_tiny_adapter(tmp_path, paths[0], seed=2, layers=(3,))
    first, last = (
        by_ranks(paths[0], 1, lambda steps: read(steps, adapter, dtype=torch.float32), pp_rank=stage, pp_size=2)[0]
        for stage in range(2)
    )
    assert all(site is None for site in first.sites) and sum(site is not None for site in last.sites) == 4
    assert first.max_rank == last.max_rank == 4
    for stage in range(2):
        with pytest.raises(ConfigError, match="more than --max-lora-rank 2"):
            by_ranks(
                paths[0],
                1,
                lambda steps: read(steps, adapter, dtype=torch.float32, max_rank=2),
                pp_rank=stage,
                pp_size=2,
            )
