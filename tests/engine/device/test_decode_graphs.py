"""Graphs: which sizes, and (by the interpreter, in a process of its own) that padded steps sample the same tokens."""

import dataclasses
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from benchmarks.gpu.engine import EagerCapture
from benchmarks.gpu.target import QWEN3_8B
from engine.attention.torch_backend import TorchBackend
from engine.config import EngineConfig
from engine.core.plan import FeatureRows, ItemImages, Plan, PlanItem, SlotOpen
from engine.device.graphs import prefill_sizes
from engine.executor.graphs import MAX_REQUESTS, GraphRecorder, PrefillGraphs, graph_sizes
from engine.executor.states import States
from engine.executor.step_part import FutureMap
from engine.flags.resolve import resolve
from engine.kernels.triton.extend_plan import MAX_WHOLE
from engine.kv.cache_spec import CacheSpec
from engine.kv.kv_pool import KVPool
from engine.kv.state_pool import StatePool, StateSpec
from engine.kv.step_batch import PageTable
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config
from engine.sampling_params import SamplingParams
from service.flags import ConfigError
from tests.attention.triton.interpreted import TIMEOUT_S, run_interpreted


@pytest.mark.parametrize(
    ("given", "max_bs", "max_running", "sizes"),
    [
        ((), None, 1, [1]),
        ((), None, 3, [1, 2, 3]),
        ((), None, 64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
        ((), 20, 64, [1, 2, 4, 8, 16, 20]),
        ((), 512, 40, [1, 2, 4, 8, 16, 24, 32, 40]),
        ((8, 2, 8), None, 64, [2, 8]),
        ((1, 8, 16, 32), None, 9, [1, 8, 16]),
    ],
)
def test_sizes(given: tuple[int, ...], max_bs: int | None, max_running: int, sizes: list[int]) -> None:
    assert graph_sizes(sizes=given, max_bs=max_bs, max_running=max_running) == sizes


def test_many_requests_take_steps_of_32() -> None:
    sizes = graph_sizes(sizes=(), max_bs=None, max_running=1000)
    assert sizes[-1] == 256 and sizes[-2] == 224
    for batch in range(1, 257):
        padded = next(size for size in sizes if size >= batch)
        assert padded - batch < (8 if batch <= 64 else 32)


def test_rows_of_drafts_have_graphs_too() -> None:
    sizes = graph_sizes(sizes=(), max_bs=None, max_running=64, rows=5)
    assert sizes[-3:] == [224, 256, 320]
    assert graph_sizes(sizes=(), max_bs=None, max_running=1000, rows=16)[-3:] == [384, 448, 512]
    assert graph_sizes(sizes=(), max_bs=600, max_running=600, rows=2)[-2:] == [576, 600], "as without drafts"
    assert graph_sizes(sizes=(8, 16), max_bs=None, max_running=8, rows=5) == [8, 16]


def test_prompts_are_recorded_as_far_as_launches_take_longer_than_their_work() -> None:
    large, small = (
        prefill_sizes(shape.config(context=4096))
        for shape in (QWEN3_8B, dataclasses.replace(QWEN3_8B, hidden=1024, intermediate=3072))
    )
    assert large == [16, 32, *range(64, 513, 64)]
    assert small[: len(large)] == large and small[len(large) :] == [*range(768, MAX_WHOLE + 1, 256)]


def prompts(sizes: list[int]) -> PrefillGraphs:
    device = torch.device("cpu")
    backend: Any = TorchBackend(KVPool([CacheSpec(1, 16, "float32")], num_pages=1, page_size=16, device=device))
    table = PageTable(num_slots=1, max_pages=1, page_size=16, device=device)
    return PrefillGraphs(sizes, GraphRecorder(EagerCapture, backend, table, FutureMap.on(device, num_slots=1)))


@pytest.mark.parametrize(
    ("lens", "taken"),  # (new tokens, tokens before them) of each request
    [
        ([(16, 0)], True),
        ([(17, 0)], False),
        ([(1, MAX_WHOLE - 1)], True),
        ([(1, MAX_WHOLE)], False),
        ([(1, 0)] * MAX_REQUESTS, True),
        ([(1, 0)] * (MAX_REQUESTS + 1), False),
    ],
)
def test_long_prompts_and_prefixes_are_no_graphs(lens: list[tuple[int, int]], taken: bool) -> None:
    graphs = prompts([2 * MAX_REQUESTS] if len(lens) > 1 else [16])
    items = [
        PlanItem(str(i), i, [0] * new, before, page_start=0, new_pages=[], sample=True, output_len=0, extend=True)
        for i, (new, before) in enumerate(lens)
    ]
    plan = Plan(seq=0, extend=True, items=items)
    assert not graphs.takes(plan), "nothing is recorded"
    graphs.record(None)  # type: ignore[arg-type]  # an eager capture runs nothing
    assert graphs.takes(plan) is taken


@pytest.mark.parametrize(
    "seen", [ItemImages(rope_delta=-4), ItemImages((FeatureRows(0, b"key", 0, 1),), ([0], [0], [0]))]
)
def test_prompts_from_their_first_image_on_are_no_graphs(seen: ItemImages) -> None:
    graphs = prompts([16])
    graphs.record(None)  # type: ignore[arg-type]  # an eager capture runs nothing
    item = PlanItem("r", 0, [0], 0, page_start=0, new_pages=[], sample=True, output_len=0, extend=True)
    assert graphs.takes(Plan(seq=0, extend=True, items=[item]))
    assert not graphs.takes(Plan(seq=0, extend=True, items=[replace(item, images=seen)]))


def test_prompts_beside_trees_of_drafts_are_no_graphs() -> None:
    """Rows of a tree lie elsewhere than in their own places."""
    graphs = prompts([16])
    graphs.record(None)  # type: ignore[arg-type]  # an eager capture runs nothing
    item = PlanItem("r", 0, [0], 0, page_start=0, new_pages=[], sample=True, output_len=0, extend=True)
    chain = replace(item, extend=False, behind=1)
    assert graphs.takes(Plan(seq=0, extend=True, items=[item, chain]))
    assert not graphs.takes(Plan(seq=0, extend=True, items=[item, replace(chain, place=5)]))


@pytest.mark.parametrize(
    ("flags", "cuda", "named"),
    [
        ({"cuda_graph_bs": (4,)}, False, "--cuda-graph-bs"),
        ({"cuda_graph_max_bs": 4}, False, "--cuda-graph-max-bs"),
        ({"cuda_graph_max_bs": 4, "disable_cuda_graph": True}, True, "--cuda-graph-max-bs"),
        ({"cuda_graph_max_bs": 4, "cuda_graph_bs": (4,)}, True, "--cuda-graph-bs"),
    ],
)
def test_flags_that_cannot_be_honoured_are_named(flags: dict[str, Any], cuda: bool, named: str) -> None:
    model = load_model_config(DEFAULT_MODEL_PATH)
    with pytest.raises(ConfigError, match=f"^{named}: "):
        resolve(EngineConfig(model_path=DEFAULT_MODEL_PATH, **flags), model, cuda=cuda)
    resolve(EngineConfig(model_path=DEFAULT_MODEL_PATH, disable_cuda_graph=True), model, cuda=cuda)


def test_a_recorded_step_has_rows_of_one_state_in_one_run() -> None:
    states = States(StatePool([StateSpec((1, 1), (1, 1, 1), "float32")], num_slots=3, device="cpu"))
    for row, state in ((0, 3), (2, 1)):
        states.open(SlotOpen(row, SamplingParams(), [], [], (), state=state))
    items = [
        PlanItem("r", row, [0], 0, page_start=0, new_pages=[], sample=True, output_len=0, extend=False, behind=behind)
        for row, behind in ((0, 0), (0, 1), (2, 0))
    ]
    assert states.recorded_rows(items, 5) == [[0, 2, 3, 4, 5], [2, 3, 4, 5, 5], [3, 1, 0, 0, 0]]


@pytest.mark.timeout(TIMEOUT_S)
def test_padded_steps_sample_the_same_tokens() -> None:
    run_interpreted("tests.engine.device.graphs_by_the_interpreter")


@pytest.mark.timeout(TIMEOUT_S)
def test_freed_pages_behind_windows_are_not_read() -> None:
    run_interpreted("tests.engine.device.windows_by_the_interpreter")
