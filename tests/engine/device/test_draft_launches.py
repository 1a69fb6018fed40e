"""Steps of a drafter never wait for the device, and launch a stated number of kernels outside their graphs and in them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.plan import Plan, PlanItem, SlotOpen
from engine.executor.model_runner import ModelRunner
from engine.model_files.drafter_config import load_eagle
from engine.model_files.model_config import ModelConfig, load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.eagle import EagleLayer, NextnLayer
from engine.models.part import ModelPart
from engine.speculative.drafts import placeholder
from tests.engine.device.launches import (
    BATCH,
    GREEDY,
    MakeDrafter,
    Recorder,
    build,
)
from tests.engine.device.unread import Unread
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.models.tiny_drafters import make_tiny_eagle

PASSES = 3
IN_A_PASS = {  # launches that a pass adds to its graph, by model and drafter
    ("qwen3", "EAGLE"): 41,
    ("qwen3", "EAGLE3"): 44,
    ("glm4_moe", "NEXTN"): 50,
    ("deepseek_v3", "NEXTN"): 61,
    ("qwen3_next", "NEXTN"): 53,
}


def eagle(path: str, config: ModelConfig, kind: str) -> MakeDrafter:
    drafter = load_eagle(path, config, kind=kind)
    return lambda model: EagleLayer(ModelPart(drafter.layers, Unread()), drafter, model)  # type: ignore[arg-type]


def nextn(config: ModelConfig) -> MakeDrafter:
    def make(model: DenseDecoder) -> NextnLayer:
        layer = NextnLayer(ModelPart(config, Unread()))  # type: ignore[arg-type]
        layer.use(model)
        return layer

    return make


def drafting(recorder: Recorder, folder: Path, family: str, kind: str, **flags: Any) -> ModelRunner:
    layers: dict[str, Any] = {"mtp_num_hidden_layers": 1} if family == "qwen3_next" else {"num_nextn_predict_layers": 1}
    config = load_model_config(make_tiny_checkpoint(folder / "model", family, **(layers if kind == "NEXTN" else {})))
    flags |= {"speculative_algorithm": kind, "speculative_num_steps": PASSES}
    if kind == "NEXTN":
        return build(recorder, config, drafter=nextn(config), **flags)
    path = make_tiny_eagle(folder / kind, kind)
    drafter = eagle(path, config, kind)
    return build(recorder, config, drafter=drafter, speculative_draft_model_path=path, **flags)


def item(slot: int, **fields: Any) -> PlanItem:
    own: dict[str, Any] = {"rid": str(slot), "slot": slot, "tokens": [1], "start": 20, "page_start": 0, "new_pages": []}
    return PlanItem(**{**own, "sample": True, "output_len": 1, "extend": False, **fields})


def launches_of(recorder: Recorder, runner: ModelRunner, plans: Sequence[Plan]) -> Counter[str]:
    """Of the last plan."""
    plans[0].opens = [SlotOpen(slot, GREEDY, [3, 4], [5], (2,)) for slot in range(BATCH)]
    with recorder, torch.no_grad():
        for plan in plans:
            recorder.launches.clear()
            runner.run(plan)
    return recorder.launches


def decode_plan(*, drafts: int = 0, unseen: bool = False) -> Plan:
    """`unseen`: the drafts lie on the device."""
    rows = [
        item(slot, start=20 + n, behind=int(n > 0), tokens=[placeholder(slot, n) if unseen and n else 1])
        for slot in range(BATCH // 2)
        for n in range(1 + drafts)
    ]
    return Plan(seq=0, extend=False, items=rows)


@pytest.mark.parametrize(("family", "kind"), IN_A_PASS)
def test_passes_are_one_graph(recorder: Recorder, tmp_path: Path, family: str, kind: str) -> None:
    """Between its input and what it drafted, for requests of one to three passes, be their drafts judged or in flight. Each pass adds so many kernels."""
    runner = drafting(recorder, tmp_path, family, kind)
    three, two, one = [graph for graph in recorder.recorded if graph["aten.logsumexp.default"]][:PASSES]
    assert three - two == two - one and 0 < sum((two - one).values()) <= IN_A_PASS[family, kind], two - one
    items = [item(slot, sample=False, to_draft=1 + slot % PASSES) for slot in range(BATCH // 2)]
    ahead: dict[str, Any] = {"sample": False, "to_draft": PASSES, "unverified": PASSES}
    items += [item(slot, tokens=[placeholder(slot, 0)], **ahead) for slot in range(BATCH // 2, BATCH)]
    launches = launches_of(recorder, runner, [decode_plan(), Plan(seq=1, extend=False, items=items)])
    assert launches == {"graph": 1, "copy to the device": 1, "copy to the host": 1}, launches


@pytest.mark.parametrize(("topk", "unseen"), [(1, False), (1, True), (2, False)])
def test_a_verified_step_is_two_graphs(recorder: Recorder, tmp_path: Path, topk: int, unseen: bool) -> None:
    """The drafter follows known tokens in the step's graph; what is accepted is the other's."""
    runner = drafting(recorder, tmp_path, "qwen3", "EAGLE3", speculative_eagle_topk=topk)
    launches = launches_of(recorder, runner, [decode_plan(), decode_plan(drafts=3, unseen=unseen)])
    assert launches["graph"] == 2 and sum(launches.values()) <= 8 + 2 * (topk > 1), launches
