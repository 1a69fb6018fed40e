"""The steps before a worker is ready: they leave no trace, and no later step launches what they have not."""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from engine.attention.triton_backend import TritonBackend
from engine.core.plan import Plan, PlanItem, SlotOpen
from engine.device.graphs import GRAPH_BYTES, LOGIT_BYTES
from engine.device.step_memory import LocalMachine
from engine.executor.graphs import DecodeGraphs
from engine.executor.warm_up import LOGPROBS, WarmUp, by_executor, warm_up
from engine.kernels.triton.decode import decode_tiles, split_list
from engine.kernels.triton.elementwise import TritonElementwise
from engine.messages import LogprobOptions
from engine.sampling_params import SamplingParams
from tests.attention.triton.day_of_steps import Anew
from tests.attention.triton.test_specialization import recorder
from tests.engine.device.test_gpu_memory import StandIn
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny_checkpoint

ROWS, CHUNK, POSITIONS, PAGE = 6, 160, 400, 16
STEPS = WarmUp(prompt_tokens=CHUNK, rows=ROWS, positions=POSITIONS, page_size=PAGE, vocab_size=VOCAB_SIZE, mixed=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=1)


@pytest.mark.parametrize("rows", [1, 5, 256])
@pytest.mark.parametrize(("prompt_tokens", "positions"), [(1, 1), (64, 40), (8704, 40960)])
def test_steps_keep_to_what_the_engine_has(rows: int, prompt_tokens: int, positions: int) -> None:
    steps = WarmUp(
        prompt_tokens=prompt_tokens,
        rows=rows,
        positions=positions,
        page_size=PAGE,
        vocab_size=100,
        mixed=True,
        drafts=True,
    )
    is_open: set[int] = set()
    for plan in steps.plans():
        is_open -= set(plan.closes)
        assert is_open == set(), "slots of the step before"
        is_open = {opened.slot for opened in plan.opens}
        assert {item.slot for item in plan.items} == is_open <= set(range(rows))
        for item in plan.items:
            assert item.q_len >= 1 and item.kv_len <= positions and set(item.new_pages) <= {0}
    assert is_open == set()
    largest = max(sum(item.q_len for item in plan.items) for plan in steps.plans())
    assert largest == max(min(prompt_tokens, rows * positions), rows)
    assert max(len(plan.items) for plan in steps.plans()) == rows


def test_they_leave_no_trace(checkpoint: str) -> None:
    flags: dict[str, Any] = {"dtype": "float32", "chunked_prefill_size": CHUNK, "max_running_requests": ROWS}
    tokens = []
    for warms in (False, True):
        with EngineInProcess(checkpoint, **flags) as engine:
            if warms:
                warm_up(by_executor(engine.parts.device.executor), STEPS, progress=False)
            for i in range(ROWS):
                engine.add(f"r{i}", prompt_of(20 * i + 1, i), temperature=i / 2, seed=i, presence_penalty=i / 4)
            engine.run()
            tokens.append(engine.tokens)
    assert tokens[0] == tokens[1]


def test_loads_of_experts_leave_them_out(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=2)
    steps = replace(STEPS, prompt_tokens=8, rows=2, positions=16)
    with EngineInProcess(path, dtype="float32", max_running_requests=2) as engine:
        runner = engine.parts.executor.runner
        warm_up(by_executor(engine.parts.device.executor), steps, progress=False)
        assert sum(map(sum, runner.expert_loads())) == 0
        engine.answer("r", prompt_of(5, 0), max_new_tokens=1)
        assert [sum(layer) for layer in runner.expert_loads()] == [5 * 3] * 2


class Operations(TorchDispatchMode):
    """Notes which of torch's operations run, on which types: each is a kernel that a GPU loads at first use."""

    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtypes = [str(x.dtype) for x in args if isinstance(x, torch.Tensor)]
        self._seen.add(f"{func} {' '.join(dtypes)}")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[str]]]:
    """What is launched: kernels of Triton by what they are compiled for, and torch's operations. Nothing is computed."""
    seen: dict[str, set[str]] = defaultdict(set)
    monkeypatch.setattr(JITFunction, "run", recorder(seen))
    monkeypatch.setattr(
        "engine.device.forward_parts.make_attention_backend",
        lambda name, pool, num_heads, needs: TritonBackend(pool, num_heads=num_heads),
    )
    monkeypatch.setattr(torch, "empty", torch.zeros)  # what a kernel leaves unwritten here must be a token
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr("engine.layers.linear.elementwise_for", lambda *_, **__: TritonElementwise())
    with Operations(seen["torch"]):
        yield seen


@pytest.mark.parametrize("graphs", [False, True])
def test_no_later_step_launches_anything_new(checkpoint: str, kernels: dict[str, set[str]], graphs: bool) -> None:
    flags: dict[str, Any] = {"dtype": "float32", "chunked_prefill_size": CHUNK, "max_running_requests": ROWS}
    rng = random.Random(graphs)
    with EngineInProcess(checkpoint, machine=LocalMachine(capture=Anew if graphs else None), **flags) as engine:
        executor = engine.parts.device.executor
        assert (engine.recorded(DecodeGraphs) is not None) == graphs
        warm_up(by_executor(executor), STEPS, progress=False)
        warm = {name: set(seen) for name, seen in kernels.items()}
        assert len(warm) > 5, "kernels of Triton, too"
        closes: list[int] = []
        for seq in range(100):
            plan = any_step(rng, seq, closes)
            closes = [opened.slot for opened in plan.opens]
            executor.collect(executor.launch(plan))
    new = {name: seen - warm.get(name, set()) for name, seen in kernels.items() if seen - warm.get(name, set())}
    assert new == {}


def test_the_memory_of_graphs_has_room_for_parts_of_split_contexts(
    checkpoint: str, kernels: dict[str, set[str]]
) -> None:
    """Of a stand-in's GPU with 8 GiB, of which KV gets little."""
    machine = LocalMachine(capture=Anew, prefills=False, gauge=StandIn(total=8 << 30))
    flags: dict[str, Any] = {"dtype": "float32", "chunked_prefill_size": 32, "max_running_requests": ROWS}
    flags |= {"max_total_tokens": None, "mem_fraction_static": 0.001, "context_length": 64}
    with EngineInProcess(checkpoint, machine=machine, **flags) as engine:
        graphs, pool = engine.recorded(DecodeGraphs), engine.parts.pool
        assert graphs is not None
        kv_heads, dim = pool.k(0).shape[2:]
        tiles, lens = decode_tiles(kv_heads=kv_heads, dim=dim, dtype=torch.float32), torch.ones(ROWS, dtype=torch.int32)
        parts = split_list(lens, lens.to(torch.int64), kv_heads=kv_heads, tiles=tiles).parts
        guessed = len(graphs.sizes) * GRAPH_BYTES + LOGIT_BYTES * ROWS * engine.model.vocab_size
        assert engine.parts.memory["graphs"] == guessed + 4 * parts * engine.model.num_heads * (dim + 2)


def any_step(rng: random.Random, seq: int, closes: list[int]) -> Plan:
    """As a scheduler may plan it, with what requests may ask for."""
    slots = rng.sample(range(ROWS), rng.randint(1, ROWS))
    extend = rng.random() < 0.5
    asked = [any_sampling(rng) for _ in slots]
    items = [any_item(rng, slot, extend=extend and (i == 0 or rng.random() < 0.5)) for i, slot in enumerate(slots)]
    opens = [
        SlotOpen(slot=slot, sampling=sampling, prompt_ids=[3, 4], output_ids=[5] * rng.randint(0, 3), eos_ids=(2,))
        for slot, sampling in zip(slots, asked, strict=True)
    ]
    masks = {i: bytes([255] * (4 * -(-VOCAB_SIZE // 32))) for i in range(len(items)) if rng.random() < 0.1}
    return Plan(seq=seq, extend=extend, items=items, opens=opens, closes=closes, masks=masks)


def any_item(rng: random.Random, slot: int, *, extend: bool) -> PlanItem:
    length = rng.randint(1, CHUNK // ROWS) if extend else 1
    start = rng.randint(0, POSITIONS - length)
    logprobs = rng.choice([None, None, None, LOGPROBS, LogprobOptions(0, 0), LogprobOptions(0, 2)])
    return PlanItem(
        rid=str(slot),
        slot=slot,
        tokens=[rng.choice([7, -(slot + 1)]) if length == 1 else 7] * length,
        start=start,
        page_start=0,
        new_pages=[1] * rng.choice([0, -(-(start + length) // PAGE)]),
        sample=not extend or rng.random() < 0.8,
        output_len=rng.randint(0, 3),
        extend=extend,
        logprobs=logprobs,
        logprob_from=start + 1 if logprobs and extend and length > 1 else None,
    )


def any_sampling(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=9,
        seed=rng.randint(0, 9),
        temperature=rng.choice([0.0, 0.5, 1.0]),
        top_k=rng.choice([-1, -1, 1, 5, 50, 10_000]),
        top_p=rng.choice([1.0, 0.5, 0.99]),
        min_p=rng.choice([0.0, 0.1]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        logit_bias=rng.choice([{}, {}, {5: 1.0, 6: -1.0}]),
        min_new_tokens=rng.choice([0, 0, 2]),
    )
