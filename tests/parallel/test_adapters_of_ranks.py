"""Adapters on ranks: cut as their matrices, they change what one rank's would change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from engine.lora.weights import AdapterWeights, read_adapter
from engine.messages import LogprobOptions
from engine.model_files.model_config import load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from engine.parallel.collectives import SINGLE_RANK, Collectives
from engine.parallel.layout import Place
from engine.parallel.region_plan import RegionPlan
from service.flags import ConfigError
from tests.engine.ranks.ranks_in_process import engine_of
from tests.lora.tiny_adapters import make_tiny_adapter
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.parallel.ranks_in_threads import run_ranks

T = TypeVar("T")
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model with KV heads that four ranks share, and an adapter of all its matrices."""
    folder = tmp_path_factory.mktemp("adapters")
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 128}
    path = make_tiny_checkpoint(folder / "model", "qwen3", dtype="bfloat16", **sizes)
    return path, make_tiny_adapter(folder / "adapter", path, seed=1)


def by_ranks(path: str, tp_size: int, work: Callable[[DenseDecoder], T], **stage: int) -> list[T]:
    """What `work` returns of each rank's part of one stage."""
    config = load_model_config(path)

    def run(collectives: Collectives) -> T:
        torch.set_num_threads(1)  # each thread has its own number
        place = Place(tp_rank=collectives.rank, tp_size=tp_size, **stage)
        given = {"dtype": "bfloat16", "device": "cpu", "progress": False}
        return work(load_model(path, config, **given, place=place, collectives=collectives))  # type: ignore[arg-type]

    if tp_size == 1:
        return [run(SINGLE_RANK)]
    return run_ranks(RegionPlan(ranks=tp_size, logits_rows=128, vocab=config.vocab_size), run)


def read(model: DenseDecoder, adapter: str, *, max_rank: int | None = None) -> AdapterWeights:
    sites = [site.shape for site in model.linear_sites()]
    cpu, elsewhere = torch.device("cpu"), model.other_sites()
    return read_adapter(adapter, sites, dtype=torch.float32, device=cpu, elsewhere=elsewhere, max_rank=max_rank)


def logprobs(paths: tuple[str, str], tp_size: int, *, adapted: bool = True, **flags: Any) -> Tensor:
    """Of a prompt, beside another one that the model alone reads."""
    lora = {"enable_lora": True, "max_lora_rank": 4, "max_total_tokens": 1024, "num_threads": 1}
    with engine_of(paths[0], tp_size=tp_size, **lora, **flags) as engine:
        store = engine.parts.adapters
        assert store is not None
        store.install(1, store.read(paths[1]))
        engine.add("other", PROMPT[::-1], max_new_tokens=1)
        engine.answer("r", PROMPT, adapter=int(adapted), logprobs=LogprobOptions(0), max_new_tokens=1)
        return torch.tensor([entry.logprob for entry in engine.input_logprobs["r"][1:]])


@pytest.mark.parametrize(("dtype", "reduce_units"), [("float32", 0), ("bfloat16", 0), ("bfloat16", 4)])
def test_adapters_on_ranks_change_what_they_change_on_one(
    paths: tuple[str, str], dtype: str, reduce_units: int
) -> None:
    alone = logprobs(paths, 1, dtype=dtype, reduce_units=reduce_units)
    exact = logprobs(paths, 1, dtype="float32")
    plain = logprobs(paths, 1, dtype=dtype, adapted=False, reduce_units=reduce_units)
    bound = 1e-4 * float(exact.abs().max()) if dtype == "float32" else 2.0 * float((alone - exact).abs().max())
    assert float((plain - alone).abs().max()) > 2 * bound, "the adapter changes little"
    for tp_size in (2, 4):
        got = logprobs(paths, tp_size, dtype=dtype, reduce_units=reduce_units)
        assert float((got - alone).abs().max()) <= bound


def test_ranks_hold_a_matrix_of_an_adapter_once(paths: tuple[str, str]) -> None:
    """A column-parallel layer's A and a row-parallel layer's B are on each rank; the other half of each is cut."""
    whole = by_ranks(paths[0], 1, lambda model: read(model, paths[1]))[0]
    ranks = by_ranks(paths[0], 2, lambda model: read(model, paths[1]))
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
        by_ranks(paths[0], 1, lambda model: read(model, adapter), pp_rank=stage, pp_size=2)[0] for stage in range(2)
    )
    assert all(site is None for site in first.sites) and sum(site is not None for site in last.sites) == 4
    assert first.max_rank == last.max_rank == 4
    for stage in range(2):
        with pytest.raises(ConfigError, match="more than --max-lora-rank 2"):
            by_ranks(
                paths[0],
                1,
                lambda model: read(model, adapter, max_rank=2),
                pp_rank=stage,
                pp_size=2,
            )


def test_a_stage_has_its_layers_of_the_cache_and_of_the_matrices(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 128}
    path = make_tiny_checkpoint(tmp_path, "qwen3", intermediate_size=832, num_hidden_layers=4, **sizes)
    for model in by_ranks(path, 4, lambda model: model, pp_rank=1, pp_size=2):
        assert [spec.num_kv_heads for spec in model.cache_specs()] == [1, 1]
        qkv, out, gate_up, down = [site.shape for site in model.linear_sites()][:4]
        assert qkv.parts[0][0] == "model.layers.2.self_attn.q_proj"
        assert (qkv.width, qkv.rows) == (128, [64, 32, 32]) and (out.width, out.rows) == (64, [128])
        assert (gate_up.width, gate_up.rows) == (128, [208, 208]) and (down.width, down.rows) == (208, [128])
        assert model.other_sites()[0].parts[0][0] == "model.layers.0.self_attn.q_proj"
