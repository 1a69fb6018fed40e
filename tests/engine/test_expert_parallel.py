"""Expert parallel: ranks that hold whole experts answer as one rank does, to the bit, however attention is cut and tokens come together."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from engine.kernels.linear import linear_kernel
from engine.messages import LogprobOptions
from tests.engine.dp_in_process import dp_ranks
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks_in_process import ranks
from tests.models.tiny_checkpoints import make_tiny_checkpoint

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


@pytest.fixture(scope="module", params=["glm4_moe", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"num_key_value_heads": 4, "num_attention_heads": 8}
    return make_tiny_checkpoint(tmp_path_factory.mktemp("ep") / "model", request.param, dtype="bfloat16", **sizes)


@contextmanager
def engines_of(path: str, *, tp_size: int = 1, pp_size: int = 1, **flags: Any) -> Iterator[tuple[list[Any], Any]]:
    """The engines of all DP ranks, and what runs them."""
    given = {**FLAGS, **flags}
    with ExitStack() as stack:
        if "dp_size" in flags:
            group = stack.enter_context(dp_ranks(path, tp_size=tp_size, **given))
            yield group.engines, group.run
        elif tp_size * pp_size > 1:
            engine = stack.enter_context(ranks(path, tp_size=tp_size, pp_size=pp_size, **given)).engine
            yield [engine], engine.run
        else:
            engine = stack.enter_context(EngineInProcess(path, **given))
            yield [engine], engine.run


def add(engine: EngineInProcess, name: str, prompt: list[int], *, new: int = 8) -> None:
    engine.add(name, prompt, logprobs=LogprobOptions(start_len=3), max_new_tokens=new, temperature=0.0)


def answered(engines: list[EngineInProcess]) -> Answers:
    return {
        rid: (tokens, [entry.logprob or 0.0 for entry in [*engine.input_logprobs[rid], *engine.logprobs[rid]]])
        for engine in engines
        for rid, tokens in engine.tokens.items()
    }


def answers(path: str, *, where: tuple[int, ...] = (0, 0, 0, 0), **flags: Any) -> Answers:
    """`where`: the DP rank of each prompt."""
    with engines_of(path, **flags) as (engines, run):
        for i, prompt in enumerate(PROMPTS):
            add(engines[where[i]], str(i), prompt)
        run()
        return answered(engines)


def test_where_each_rank_attends_for_itself_no_flag_is_needed(model: str) -> None:
    """Idle ranks included: the second has nothing, then less than the first."""
    alone = answers(model)
    for where in [(0, 0, 0, 0), (0, 1, 0, 0)]:
        assert answers(model, where=where, tp_size=2, dp_size=2, ep_size=2) == alone, where


@pytest.mark.parametrize(
    "shape",
    [
        {"tp_size": 2, "ep_size": 2},
        {"tp_size": 4, "ep_size": 4},
        {"tp_size": 2, "ep_size": 2, "pp_size": 2},
        {"tp_size": 4, "ep_size": 4, "dp_size": 2, "where": (1, 0, 1, 0)},
        {"tp_size": 2, "ep_size": 2, "by_groups": True, "disable_cuda_graph": True},
        {"tp_size": 4, "ep_size": 4, "nnodes": 2, "dist_init_addr": "127.0.0.1:1"},
        {"tp_size": 2, "ep_size": 1},
    ],
    ids=lambda shape: " ".join(
        f"{name}={value}" for name, value in shape.items() if name.endswith("s") or "size" in name
    ),
)
def test_with_reduce_units_no_bit_depends_on_the_ranks(model: str, shape: dict[str, Any]) -> None:
    """Attention's heads are cut, and experts are not, or are. By groups: as on GPUs."""
    assert answers(model, reduce_units=4, **shape) == answers(model, reduce_units=4)
