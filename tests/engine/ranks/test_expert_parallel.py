"""Expert parallel: ranks that hold whole experts answer as one rank does, to the bit, however attention is cut and tokens come together."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from engine.kernels.linear import linear_kernel
from engine.messages import LogprobOptions
from engine.model_files.model_config import load_model_config
from engine.models.expert_balance import ExpertBalance
from engine.models.expert_parallel import Placed
from engine.parallel.expert_placement import imbalance, trivial
from tests.cells import in_turn, some
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.dp_in_process import dp_ranks
from tests.engine.ranks.ranks_in_process import engine_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint, write_tensors

PROMPTS = [prompt_of(70, 1), prompt_of(9, 2), prompt_of(33, 3), prompt_of(5, 4)]
FLAGS: dict[str, Any] = {
    "page_size": 4,
    "max_total_tokens": 1024,
    "num_threads": 1,
    "chunked_prefill_size": 32,
    "dtype": "bfloat16",
}
Answers = dict[str, tuple[list[int], list[float]]]  # tokens and their logprobs, by request

pytestmark = pytest.mark.skipif(linear_kernel() is None, reason="bits are promised of the C kernel of bf16")


MODELS = ("glm4_moe", "gpt_oss", "qwen3_moe")


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"num_key_value_heads": 4, "num_attention_heads": 8}
    return make_tiny_checkpoint(tmp_path_factory.mktemp("ep") / "model", family, dtype="bfloat16", **sizes)


@contextmanager
def engines_of(path: str, *, tp_size: int = 1, pp_size: int = 1, **flags: Any) -> Iterator[tuple[list[Any], Any]]:
    """The engines of all DP ranks, and what runs them."""
    given = {**FLAGS, **flags}
    with ExitStack() as stack:
        if "dp_size" in flags:
            group = stack.enter_context(dp_ranks(path, tp_size=tp_size, **given))
            yield group.engines, group.run
        else:
            engine = stack.enter_context(engine_of(path, tp_size=tp_size, pp_size=pp_size, **given))
            yield [engine], engine.run


def add(engine: EngineInProcess, name: str, prompt: list[int], *, new: int = 8) -> None:
    engine.add(name, prompt, logprobs=LogprobOptions(start_len=3), max_new_tokens=new, temperature=0.0)


def answered(engines: list[EngineInProcess]) -> Answers:
    return {rid: (engine.tokens[rid], found) for engine in engines for rid, found in engine.all_logprobs().items()}


def answers(path: str, *, where: tuple[int, ...] = (0, 0, 0, 0), **flags: Any) -> Answers:
    """`where`: the DP rank of each prompt."""
    with engines_of(path, **flags) as (engines, run):
        for i, prompt in enumerate(PROMPTS):
            add(engines[where[i]], str(i), prompt)
        run()
        return answered(engines)


@cache
def alone_in_units(path: str) -> Answers:
    """Of one rank: what all shapes are compared with."""
    return answers(path, reduce_units=4)


@pytest.mark.parametrize("family", MODELS, scope="module")
def test_where_each_rank_attends_for_itself_no_flag_is_needed(model: str) -> None:
    """Idle ranks included: the second has nothing, then less than the first."""
    alone = answers(model)
    for where in [(0, 0, 0, 0), (0, 1, 0, 0)]:
        assert answers(model, where=where, tp_size=2, dp_size=2, ep_size=2) == alone, where


@pytest.mark.parametrize("family", MODELS, scope="module")
def test_experts_of_any_family_may_lie_in_any_order(model: str, tmp_path: Path) -> None:
    file, count = tmp_path / "experts.json", load_model_config(model).experts.count
    file.write_text(
        json.dumps({"logical_count": [[1, *[9, 2] * (count // 2 - 1), 90]] * load_model_config(model).num_layers})
    )
    flags = {"ep_num_redundant_experts": 2, "init_expert_location": str(file)}
    assert answers(model, tp_size=2, dp_size=2, ep_size=2, **flags) == answers(model)


# Attention's heads are cut, and experts are not, or are. By groups: as on GPUs.
SHAPES: dict[str, dict[str, Any]] = {
    "2 stages": {"tp_size": 2, "ep_size": 2, "pp_size": 2},
    "2 DP ranks": {"tp_size": 4, "ep_size": 4, "dp_size": 2, "where": (1, 0, 1, 0)},
    "2 DP ranks by groups": {
        "tp_size": 4,
        "ep_size": 4,
        "dp_size": 2,
        "where": (1, 0, 0, 0),
        "by_groups": True,
        "disable_cuda_graph": True,
    },
    "by groups": {"tp_size": 2, "ep_size": 2, "by_groups": True, "disable_cuda_graph": True},
    "2 machines": {"tp_size": 4, "ep_size": 4, "nnodes": 2, "dist_init_addr": "127.0.0.1:1"},
    "experts cut": {"tp_size": 2, "ep_size": 1},
}


@pytest.mark.parametrize(("family", "shape"), in_turn(MODELS, [*SHAPES]), scope="module")
def test_with_reduce_units_no_bit_depends_on_the_ranks(model: str, shape: str) -> None:
    assert answers(model, reduce_units=4, **SHAPES[shape]) == alone_in_units(model)


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture whose router takes two of the last four experts for each token, and one more."""
    folder = tmp_path_factory.mktemp("skewed")
    path = make_tiny_checkpoint(folder, "qwen3_moe", dtype="bfloat16", num_key_value_heads=4, num_attention_heads=8)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor[4::2] *= 8.0
            tensor[5::2] = -tensor[4::2]  # of each pair one has a large score
    write_tensors(folder, tensors)
    return path


EPLB: dict[str, Any] = {"enable_eplb": True, "eplb_rebalance_num_iterations": 16}


def test_copies_of_an_expert_share_its_tokens() -> None:
    """A map needs no weights. Expert 0 has three slots."""
    placed = Placed((0, 1, 0, 2, 0, 3), cast(Any, None), count=4, device=torch.device("cpu"))
    slots = placed.slots_of(torch.zeros((9, 1), dtype=torch.int64))
    assert torch.bincount(slots.flatten(), minlength=6).tolist() == [3, 0, 3, 0, 3, 0]
    assert placed.loads(torch.tensor([3, 5, 4, 7, 2, 1])).tolist() == [9, 5, 7, 1]


@cache
def long_answers(path: str, units: int | None) -> Answers:
    """Of one rank."""
    with engines_of(path, **({} if units is None else {"reduce_units": units})) as (engines, run):
        for i, prompt in enumerate(PROMPTS):
            add(engines[0], str(i), prompt, new=60)
        run()
        return answered(engines)


def balances(engines: list[Any]) -> list[ExpertBalance]:
    found = [engine.parts.executor.runner.balance for engine in engines]
    assert all(isinstance(one, ExpertBalance) for one in found)
    return found


MOVED: dict[str, dict[str, Any]] = {
    "2 DP ranks": {"tp_size": 2, "ep_size": 2, "dp_size": 2},
    "2 ranks": {"tp_size": 2, "ep_size": 2, "reduce_units": 4},
    "4 ranks, 2 DP ranks": {"tp_size": 4, "ep_size": 4, "dp_size": 2, "reduce_units": 4, "ep_num_redundant_experts": 4},
    "2 machines": {**SHAPES["2 machines"], "reduce_units": 4},
}


@pytest.mark.parametrize("name", some(MOVED, tried=["2 DP ranks", "2 machines"]))
def test_experts_move_while_requests_run_and_no_token_changes(skewed: str, name: str) -> None:
    """All layers move while 60 tokens are made; then the loads since are more even than they would be in order."""
    shape = MOVED[name]
    alone = long_answers(skewed, shape.get("reduce_units"))
    with engines_of(skewed, **shape, **EPLB) as (engines, run):
        for i, prompt in enumerate(PROMPTS):
            add(engines[i % len(engines)], str(i), prompt, new=60)
        run()
        assert answered(engines) == alone
        for balance in balances(engines):
            assert balance.rounds >= 2 and balance.moved_layers >= 2 and not balance.failed_layers
            gauges = engines[0].parts.executor.runner.expert_gauges()
            assert gauges["expert_rebalances"] >= 2 and gauges["expert_imbalance"] > 1.2
            assert gauges["expert_rank_imbalance_after"] <= gauges["expert_rank_imbalance_before"]
            loads = [layer.loads.tolist() for layer in balance.layers]
            size, slots = shape["ep_size"], len(loads[0]) + shape.get("ep_num_redundant_experts", 0)
            at_start = [imbalance(trivial(len(of_one), slots=slots), of_one, ranks=size) for of_one in loads]
            now = [
                imbalance(layer.placed.placement, of_one, ranks=size)
                for layer, of_one in zip(balance.layers, loads, strict=True)
            ]
            assert sum(now) < sum(at_start) and sum(at_start) / len(loads) > 1.2, (at_start, now)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_where_steps_are_recorded_experts_move_within_their_memory(tmp_path: Path, family: str) -> None:
    """With sums by groups, as on GPUs: graphs go on reading at the addresses at which they were recorded."""
    path = make_tiny_checkpoint(tmp_path, family, num_key_value_heads=4, num_attention_heads=8)
    flags = {"dtype": "float32"}
    expected = answers(path, **flags)
    shape = {"tp_size": 2, "ep_size": 2, "by_groups": True, "disable_cuda_graph": True, "ep_num_redundant_experts": 2}
    with engines_of(path, **shape, **flags, **{**EPLB, "eplb_rebalance_num_iterations": 2}) as (engines, run):
        (balance,) = balances(engines)
        placements, memory = [layer.placed.placement for layer in balance.layers], tensors_of(balance)
        until_s, rounds = time.monotonic() + 60.0, 0
        while not balance.moved_layers and time.monotonic() < until_s:  # a thread reads while steps run
            rounds += 1
            for i, prompt in enumerate(PROMPTS):
                add(engines[0], f"{i} {rounds}", prompt)
            run()
        for rid, (tokens, _) in answered(engines).items():
            assert tokens == expected[rid.split()[0]][0], rid
        assert balance.moved_layers and [layer.placed.placement for layer in balance.layers] != placements
        assert tensors_of(balance) == memory


def tensors_of(balance: ExpertBalance) -> list[int]:
    """Addresses of the maps and the weights of all layers' experts."""

    def inside(one: object) -> list[int]:
        if isinstance(one, torch.Tensor):
            return [one.data_ptr()]
        values = one if isinstance(one, list) else vars(one).values() if hasattr(one, "__dict__") else ()
        return [address for value in values for address in inside(value)]

    return [address for layer in balance.layers for address in inside(layer.placed)]


def test_experts_of_files_that_have_changed_stay_where_they_are(skewed: str) -> None:
    """On all ranks, and requests go on."""
    shape = {"tp_size": 2, "ep_size": 2, "reduce_units": 2, **EPLB}
    expected = answers(skewed, reduce_units=2)
    with engines_of(skewed, **shape) as (engines, run):
        os.utime(Path(skewed) / "model.safetensors")
        for i, prompt in enumerate(PROMPTS):
            add(engines[0], str(i), prompt)
        add(engines[0], "long", PROMPTS[0], new=60)
        run()
        found = answered(engines)
        assert {rid: found[rid] for rid in expected} == expected
        (balance,) = balances(engines)
        assert balance.failed_layers > 0 and balance.moved_layers == 0


def test_a_placement_of_the_start_and_loads_change_no_token(skewed: str, tmp_path: Path) -> None:
    shape = {"tp_size": 2, "ep_size": 2, "reduce_units": 2}
    expected, file = answers(skewed, reduce_units=2), tmp_path / "experts.json"
    for found, more in (
        ({"physical_to_logical_map": [[7, 6, 5, 4, 3, 2, 1, 0]] * 4}, {}),
        ({"logical_count": [[1, 1, 1, 1, 90, 1, 1, 9]] * 4}, {"ep_num_redundant_experts": 2}),
    ):
        file.write_text(json.dumps(found))
        assert answers(skewed, **shape, init_expert_location=str(file), **more) == expected


@pytest.mark.parametrize("family", ["granitemoehybrid", "qwen3_5_moe_text"])
def test_experts_of_hybrids_move_too(tmp_path: Path, family: str) -> None:
    """Their checkpoints keep all experts of a layer in one tensor."""
    path, flags = make_tiny_checkpoint(tmp_path, family, dtype="bfloat16"), {"chunked_prefill_size": 64}
    moving = {**EPLB, "eplb_rebalance_num_iterations": 2, "ep_num_redundant_experts": 2}
    expected = answers(path, reduce_units=2, **flags)
    assert answers(path, tp_size=2, ep_size=2, reduce_units=2, **flags, **moving) == expected
