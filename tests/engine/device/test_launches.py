"""A decode step of 64 requests never waits for its device, and launches a stated number of kernels outside its graph."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.plan import Plan
from engine.executor.model_runner import ModelRunner
from engine.messages import LogprobOptions
from engine.model_files.model_config import ModelConfig, load_model_config
from engine.sampling_params import SamplingParams
from tests.engine.device.launches import (
    BATCH,
    GREEDY,
    VOCAB,
    Recorder,
    build,
    decode_step,
    launches_of,
)
from tests.engine.device.unread import META, PackedExperts, Unread
from tests.models.tiny_checkpoints import make_tiny_checkpoint

KINDS = {
    "greedy": GREEDY,
    "temperature": SamplingParams(seed=1, temperature=0.8),
    "top_k": SamplingParams(seed=1, top_k=50),
    "top_p": SamplingParams(seed=1, top_p=0.9),
    "penalties": SamplingParams(seed=1, presence_penalty=0.5, repetition_penalty=1.1),
}


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)
    return replace(load_model_config(folder), vocab_size=VOCAB)


@pytest.fixture
def runner(recorder: Recorder, model_config: ModelConfig) -> ModelRunner:
    return build(recorder, model_config)


LAUNCHES = 4  # of any kind, copies included: the graph's input, the graph, tokens and marks of bad rows


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_launches_no_more_than_stated(recorder: Recorder, runner: ModelRunner, kind: str) -> None:
    launches = launches_of(recorder, runner, KINDS[kind], decode_step)
    assert launches["graph"] == 1
    assert sum(launches.values()) <= LAUNCHES, launches


LAYER = {"linear_kernel": 4, "rope_write_kernel": 1, "decode_split_kernel": 1}
EXPERTS = dict.fromkeys(("route_kernel", "sort_kernel", "up_kernel", "down_kernel", "sum_kernel"), 1)
MIXTURES = {"qwen3_moe": 12, "gpt_oss": 12, "glm4_moe": 14}  # launches of a layer
MIXTURES |= {"deepseek_v2": 17, "deepseek_v3": 19, "glm4_moe_lite": 19}  # of latents; the last have a LoRA of queries
# With biases, a gelu, scaled sums, norms behind products, attention beside the MLP (its LayerNorm, gelu and sums are torch's).
DENSE = {"qwen2": 6, "gemma": 6, "granite": 6, "gemma2": 8, "glm4": 8, "olmo2": 9, "phi": 10}


@pytest.mark.parametrize("kept", ["auto", "fp8_e4m3"])
def test_a_layer_adds_no_more_to_a_graph_than_stated(recorder: Recorder, model_config: ModelConfig, kept: str) -> None:
    assert added_by_a_layer(recorder, model_config, kv_cache_dtype=kept) == LAYER


@pytest.mark.parametrize("family", DENSE)
def test_a_layer_of_a_family_adds_no_more_than_stated(
    recorder: Recorder, tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    config = load_model_config(make_tiny_checkpoint(tmp_path_factory.mktemp(family), family, num_hidden_layers=3))
    added = added_by_a_layer(recorder, config)
    assert added["linear_kernel"] == 4 and sum(added.values()) <= DENSE[family], added


def added_by_a_layer(
    recorder: Recorder, config: ModelConfig, checkpoint: type[Unread] = Unread, **flags: Any
) -> Counter[str]:
    """`flags`: also `apart` of `build`."""
    counts = []
    for num_layers in (2, 3):
        recorder.recorded.clear()
        build(recorder, replace(config, num_layers=num_layers), checkpoint=checkpoint, **flags)
        counts.append(recorder.recorded[0])
    return counts[1] - counts[0]


@pytest.mark.parametrize("family", MIXTURES)
def test_a_layer_of_experts_adds_no_more_than_stated(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    config = load_model_config(make_tiny_checkpoint(tmp_path_factory.mktemp(family), family, num_hidden_layers=3))
    for kept in ("auto", "fp8_e4m3"):
        added = added_by_a_layer(recorder, config, kv_cache_dtype=kept)
        assert {name: added[name] for name in EXPERTS} == EXPERTS
        assert sum(added.values()) <= MIXTURES[family], added
    monkeypatch.setattr("engine.models.quantized_tensors.takes_triton", lambda _: True)
    monkeypatch.setattr("engine.quant.integers.Integers.to", lambda own, _: own)  # packing reads them
    assert added_by_a_layer(recorder, config, PackedExperts) == added
    assert recorder.forms == {"e2m1" if family == "gpt_oss" else "int8"}


def test_a_pool_of_windows_costs_three_launches_of_a_step(recorder: Recorder, tmp_path: Any) -> None:
    """Pages of both pools come in one copy; layers launch what they ever do."""
    config = load_model_config(make_tiny_checkpoint(tmp_path, "gpt_oss", num_hidden_layers=3))
    layers, steps, outside = [], [], []
    for apart in (False, True):
        layers.append(added_by_a_layer(recorder, config, apart=apart))
        steps.append(recorder.recorded[0])
        runner = build(recorder, config, apart=apart)
        new_window = (4,) if apart else ()
        outside.append(
            Counter(
                launches_of(
                    recorder,
                    runner,
                    GREEDY,
                    lambda seq, new=new_window: decode_step(seq, new_pages=(3,), new_window=new),
                )
            )
        )
    assert layers[0] == layers[1] and outside[0] == outside[1], (layers, outside)
    assert sum((steps[1] - steps[0]).values()) <= 3, steps


@pytest.mark.parametrize(
    ("make_step", "more"),
    [
        (lambda seq: decode_step(seq, new_pages=(3,)), 3),
        (lambda seq: replace(decode_step(seq), masks=dict.fromkeys(range(BATCH), b"\xff" * (4 * -(-VOCAB // 32)))), 12),
        (lambda seq: decode_step(seq, logprobs=LogprobOptions(start_len=-1, top_num=5)), 11),  # of all requests at once
    ],
    ids=["new pages", "masks", "logprobs"],
)
def test_what_else_a_step_may_bring(
    recorder: Recorder, runner: ModelRunner, make_step: Callable[[int], Plan], more: int
) -> None:
    launches = launches_of(recorder, runner, GREEDY, make_step)
    assert sum(launches.values()) <= LAUNCHES + more, launches


HYBRIDS = {  # layers with the kernel, of 4; launches of a layer, those of the step among them
    "qwen3_5_text": ("delta_kernel", 2, 25),
    "falcon_h1": ("mamba_kernel", 4, 25),
    "granitemoehybrid": ("mamba_kernel", 2, 25),
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_step_of_a_hybrid_is_one_graph_too(recorder: Recorder, tmp_path: Any, family: str) -> None:
    model_config = load_model_config(make_tiny_checkpoint(tmp_path / family, family))
    launches = launches_of(recorder, build(recorder, model_config), GREEDY, decode_step)
    assert launches["graph"] == 1 and sum(launches.values()) <= LAUNCHES, launches
    (kernel, layers, most), recorded = HYBRIDS[family], recorder.recorded[0]
    assert recorded["conv_kernel"] == recorded[kernel] == layers and sum(recorded.values()) <= 4 * most, recorded


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_never_waits_outside_graphs(recorder: Recorder, tmp_path: Any, family: str) -> None:
    """Answers alone, then beside prompts of a chunk and more, all in the same launches."""
    model_config = load_model_config(make_tiny_checkpoint(tmp_path / family, family))
    runner = build(recorder, model_config, disable_cuda_graph=True)

    launches = launches_of(recorder, runner, GREEDY, lambda seq: decode_step(seq, new_pages=(3, 4, 5), prompts=30))
    assert launches["conv_kernel"] == HYBRIDS[family][1] and sum(launches.values()) <= 4 * 150, launches


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x.cpu(),
        lambda x: torch.zeros(4).copy_(x),
        lambda x: torch.zeros(4).copy_(x, non_blocking=True),
        lambda x: torch.zeros(4).to(META),
        lambda x: torch.zeros(4).to(META, non_blocking=True),
        lambda x: torch.zeros(4).pin_memory().to(META),
        lambda x: x[torch.tensor([1, 2])],
    ],
)
def test_a_wait_is_found(recorder: Recorder, waits: Callable[[Tensor], object]) -> None:
    with recorder, pytest.raises((AssertionError, RuntimeError)):
        waits(torch.zeros(4, device=META))
