"""Plans with speculation: memory as an engine lays it out, times worked out by hand, and tokens a step as chances give."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors import safe_open

from engine.config import EngineConfig
from engine.core.plan import Plan
from engine.flags.resolve import resolve
from engine.flags.speculation import with_drafter
from engine.model_files.model_config import WIDE_MODEL_PATH, ModelConfig, load_model_config
from planner.executor import Speculation
from planner.memory import (
    DrafterTime,
    by_roofline,
    by_weights,
    drafter_shape,
    kv_pages,
    page_bytes,
    pass_loads,
    plan_seconds,
    weight_bytes,
)
from planner.step_time import GPUS, Efficiency, Fitted, Roofline, StepLoad, shape_of
from tests.core.engine_in_a_test import plan_item
from tests.engine.ranks.ranks_in_process import ranks
from tests.models.recall_drafters import build
from tests.planner.planned import STEP_TIME, assert_at_rest, cluster, request_at

FOREVER = float("inf")
FREE = Fitted(
    prefill_step_s=0.0,
    prefill_token_s=0.0,
    prefill_pair_s=0.0,
    decode_step_s=0.0,
    decode_request_s=0.0,
    decode_context_s=0.0,
)
ROWS_ARE_FREE = replace(STEP_TIME, decode_request_s=0.0, decode_context_s=0.0)
FREE_DRAFTER = DrafterTime(beside=FREE, a_pass=FREE, step_s=0.0001)


def flags_of(kind: str, folder: Path) -> dict[str, Any]:
    path = WIDE_MODEL_PATH if kind == "STANDALONE" else build(kind, folder)
    return {"speculative_algorithm": kind, "speculative_draft_model_path": path}


def drafted(**flags: Any) -> tuple[EngineConfig, ModelConfig]:
    model = load_model_config(WIDE_MODEL_PATH)
    config = resolve(EngineConfig(model_path=WIDE_MODEL_PATH, **flags), model, cuda=False)
    return config, with_drafter(config, model)


@pytest.mark.parametrize(("kind", "tp_size"), [("STANDALONE", 1), ("EAGLE", 1), ("EAGLE3", 2)])
def test_a_drafters_part_of_a_page_is_that_of_an_engine(kind: str, tp_size: int, tmp_path: Path) -> None:
    """KV and tails, of each rank."""
    flags = {"page_size": 4, "max_total_tokens": 1000, "num_threads": 1, **flags_of(kind, tmp_path)}
    config, model = drafted(**flags)
    planned = page_bytes(model, tp_size, page_size=4)
    assert planned > page_bytes(replace(model, drafter=None), tp_size, page_size=4)
    with ranks(WIDE_MODEL_PATH, tp_size=tp_size, **flags) as group:
        for pool in (group.engine.parts.pool, *group.pools.values()):
            assert pool.page_bytes == planned
            assert pool.num_pages == kv_pages(config, model, tp=tp_size, memory_bytes=None, gpu="", longest=10)


@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3"])
def test_a_drafters_weights_are_those_of_its_file(kind: str, tmp_path: Path) -> None:
    _, model = drafted(**flags_of(kind, tmp_path))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    numbers = sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    own, found = shape_of(model), drafter_shape(model)
    assert found.weight_bytes == 2 * numbers == weight_bytes(model) - own.weight_bytes
    head = found.head_params if kind == "EAGLE3" else 0
    assert found.layer_params == numbers - head and found.head_params <= own.head_params
    assert found.read_bytes == 2 * (found.layer_params + found.head_params)


def test_a_step_of_passes_has_a_row_of_each_request_that_is_not_done() -> None:
    items = [
        msgspec.structs.replace(plan_item(start=start, extend=False, sample=False), to_draft=count)
        for start, count in ((9, 3), (4, 1))
    ]
    plan = Plan(1, False, items)
    assert pass_loads(plan) == [
        StepLoad(decodes=2, decode_context=10 + 5, samples=2),
        StepLoad(decodes=1, decode_context=11, samples=1),
        StepLoad(decodes=1, decode_context=12, samples=1),
    ]
    drafter = DrafterTime(beside=FREE, a_pass=replace(FREE, decode_step_s=1.0, decode_request_s=0.1), step_s=7.0)
    assert plan_seconds(plan, STEP_TIME, drafter) == pytest.approx(7.0 + 3 * 1.0 + 4 * 0.1)


def test_a_drafter_computes_beside_each_step() -> None:
    plan = Plan(1, False, [plan_item(start=9, extend=False)])
    drafter = DrafterTime(beside=replace(FREE, decode_step_s=1.0), a_pass=FREE, step_s=7.0)
    assert plan_seconds(plan, STEP_TIME, drafter) == pytest.approx(plan_seconds(plan, STEP_TIME, None) + 1.0)


def test_times_of_a_drafter_follow_from_what_it_reads(tmp_path: Path) -> None:
    """Its head is read in passes alone. By a data sheet, and by the model's measured times."""
    _, model = drafted(**flags_of("EAGLE3", tmp_path))
    own, shape, load = shape_of(model), drafter_shape(model), StepLoad(decodes=1, decode_context=0, samples=1)
    sheet = Roofline(gpu=GPUS["L4"], shape=own, efficiency=Efficiency(compute=0.5, memory=1.0, step_s=0.004))
    time = by_roofline(sheet, shape)
    per_byte = 1 / (GPUS["L4"].memory_gb_s * 1e9)
    assert time.step_s == 0.004
    assert time.a_pass.seconds(load) == pytest.approx(0.004 / own.layers + shape.read_bytes * per_byte, rel=1e-6)
    assert time.beside.seconds(load) == pytest.approx(2 * shape.layer_params * per_byte, rel=1e-6)
    measured = by_weights(replace(FREE, decode_step_s=1.0), own, shape)
    assert measured.a_pass.seconds(load) == pytest.approx(shape.read_bytes / own.read_bytes)
    assert measured.beside.seconds(load) == pytest.approx(2 * shape.layer_params / own.read_bytes)


@pytest.mark.parametrize("layout", ["1U", "1P1D", "1U-mixed"])
@pytest.mark.parametrize("time", [None, FREE_DRAFTER], ids=["n-grams", "a model"])
def test_where_rows_are_free_steps_give_what_chances_say(layout: str, time: DrafterTime | None) -> None:
    """Four drafts, each right with 0.6 behind right ones: 1 + 0.6 + 0.6^2 + 0.6^3 + 0.6^4 tokens a step."""
    speculation = Speculation(most=4, accept_rate=0.6, time=time)
    planned = cluster(layout, step_time=ROWS_ARE_FREE, speculation=speculation)
    records = planned.run([request_at(i, 50, 200, block=i) for i in range(12)], rate=4, until_s=FOREVER)
    assert all(record.error is None and record.output_tokens == 200 for record in records)
    assert planned.step_tokens == pytest.approx(sum(0.6**n for n in range(5)), rel=0.06)
    assert_at_rest(planned)


def test_where_n_grams_match_in_half_of_the_steps_these_give_half() -> None:
    """A step without a match gives one token."""
    speculation = Speculation(most=4, accept_rate=0.6, match_rate=0.5, time=None)
    planned = cluster("1U", step_time=ROWS_ARE_FREE, speculation=speculation)
    planned.run([request_at(i, 50, 200, block=i) for i in range(12)], rate=4, until_s=FOREVER)
    assert planned.step_tokens == pytest.approx(1 + sum(0.6**n for n in range(1, 5)) / 2, rel=0.06)


@pytest.mark.parametrize("time", [None, FREE_DRAFTER], ids=["n-grams", "a model"])
def test_speculation_pays_where_rows_are_cheap_and_ends_where_they_are_not(time: DrafterTime | None) -> None:
    speculation = Speculation(most=4, accept_rate=0.6, time=time)
    asked = [request_at(i, 50, 200, block=i) for i in range(4)]

    def e2e_s(step_time: Fitted, speculation: Speculation | None) -> float:
        return sum(
            r.e2e_s
            for r in cluster("1U", step_time=step_time, speculation=speculation).run(asked, rate=1, until_s=FOREVER)
        )

    rows_are_all = replace(STEP_TIME, decode_step_s=1e-6, decode_request_s=0.01)
    assert e2e_s(ROWS_ARE_FREE, speculation) < 0.6 * e2e_s(ROWS_ARE_FREE, None)
    assert e2e_s(rows_are_all, speculation) == pytest.approx(e2e_s(rows_are_all, None), rel=0.05)
