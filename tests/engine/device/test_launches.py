"""A decode step of 64 requests never waits for its device, and launches a stated number of kernels outside its graph.

The meta device stands for a GPU: code takes the same ways as there, and nothing has bytes, so a read by the host fails. What
torch dispatches is counted, Triton's launches are counted in place of being made, and a graph's replay does nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from engine.config import EngineConfig
from engine.core.plan import Plan, PlanItem, SlotOpen
from engine.device.device import build_device
from engine.device.step_memory import RankSeat, Recording, StepMemory
from engine.executor.graphs import Work
from engine.executor.model_runner import ModelRunner
from engine.flags.resolve import resolve
from engine.kernels.triton.elementwise import TritonElementwise
from engine.kernels.triton.recurrent import TritonRecurrent
from engine.kv.kv_pool import KVPool
from engine.messages import LogprobOptions
from engine.model_files.model_config import ModelConfig, load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.part import ModelPart
from engine.parallel.layout import Extent, cut_of
from engine.sampling_params import SamplingParams
from tests.models.tiny_checkpoints import make_tiny_checkpoint

BATCH, VOCAB = 64, 151_936
META = torch.device("meta")
GREEDY = SamplingParams(temperature=0.0, seed=1)
KINDS = {
    "greedy": GREEDY,
    "temperature": SamplingParams(seed=1, temperature=0.8),
    "top_k": SamplingParams(seed=1, top_k=50),
    "top_p": SamplingParams(seed=1, top_p=0.9),
    "penalties": SamplingParams(seed=1, presence_penalty=0.5, repetition_penalty=1.1),
}


class Unread:
    """A checkpoint in its types and shapes alone."""

    dtype_name, dtype, device = "bfloat16", torch.bfloat16, META

    def has(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: list[Extent], *, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty([len(cut_of(size)) for size in shape], dtype=dtype or self.dtype, device=META)

    def take_rows(self, names: list[str], rows: list[Extent], rest: list[Extent], **dtype: Any) -> Tensor:
        return self.take("", [sum(len(cut_of(count)) for count in rows), *rest], **dtype)

    def take_integers(self, *_: object) -> None:
        """It has none."""

    def ignore(self, name: str) -> None:
        """It has no tensors."""


class Recorder(TorchDispatchMode):
    """Counts launches and copies; fails where the host would wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.recorded: list[Counter[str]] = []  # of each graph
        self.pinned: dict[int, Tensor] = {}

    def pin(self, host: Tensor) -> Tensor:
        self.pinned[host.data_ptr()] = host
        return host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            return self._copy(args[0], args[1], asynchronous=kwargs.get("non_blocking") or args[2:] == (True,))
        devices = {x.device.type for x in flat(args) if isinstance(x, Tensor) and x.dim() > 0}
        out = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default and devices == {"cpu"} and out.device == META:
            return self._copy(out, args[0], asynchronous=kwargs.get("non_blocking", False))
        assert len(devices) < 2, f"{func} waits: it reads host memory beside the device's"
        is_free = func.is_view or "empty" in func.overloadpacket.__name__
        if any(x.device == META for x in flat([out]) if isinstance(x, Tensor)) and not is_free:
            self.launches[str(func)] += 1
        return out

    def _copy(self, to: Tensor, source: Tensor, *, asynchronous: bool) -> Tensor:
        """A copy between host and device is a wait unless it is asked not to be, from or to pinned memory."""
        host = to if to.device.type == "cpu" else source
        if to.device == source.device:
            self.launches["copy on the device"] += 1
        else:
            assert asynchronous, "a copy between host and device waits: non_blocking"
            assert host.data_ptr() in self.pinned, "a copy between host and device waits: its memory is not pinned"
            self.launches["copy to the host" if host is to else "copy to the device"] += 1
        return to


def flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from flat(value)
        else:
            yield value


class OneLaunch:
    """A capture whose graphs do nothing but count."""

    def __init__(self, recorder: Recorder) -> None:
        self._launches, self._recorded = recorder.launches, recorder.recorded

    def capture(self, work: Work) -> Work:
        before = self._launches.copy()
        out = work()
        self._recorded.append(self._launches - before)

        def replay() -> Tensor:
            self._launches["graph"] += 1
            return out

        return replay


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)
    return replace(load_model_config(folder), vocab_size=VOCAB)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found, real_empty = Recorder(), torch.empty

    def empty(*size: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = real_empty(*size, **kwargs)
        return found.pin(made) if pin_memory else made

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: found.pin(x.clone()))
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *_, **__: found.launches.update([kernel.fn.__name__]))
    monkeypatch.setattr("engine.layers.recurrence.recurrent_on_gpu", lambda _: TritonRecurrent())
    monkeypatch.setattr("engine.layers.linear.elementwise_for", lambda *_, **__: TritonElementwise())
    monkeypatch.setattr("engine.models.expert_mlp.takes_triton", lambda _: True)
    return found


@pytest.fixture
def runner(recorder: Recorder, model_config: ModelConfig) -> ModelRunner:
    return build(recorder, model_config)


def build(recorder: Recorder, model_config: ModelConfig, *, watched: tuple[int, ...] = (), **flags: Any) -> ModelRunner:
    config = EngineConfig(device="cuda", max_running_requests=BATCH, max_total_tokens=8192, **flags)
    config = replace(resolve(config, model_config, cuda=True), stream="inline")
    model = DenseDecoder(ModelPart(model_config, Unread()))  # type: ignore[arg-type]
    model.watch(watched)
    with recorder:
        device = build_device(
            config,
            model_config,
            model,
            StepMemory(pool=KVPool(model.cache_specs(), num_pages=256, page_size=16, device=META)),
            records=Recording(decodes=True, capture=lambda: OneLaunch(recorder)),
            seat=RankSeat(),
        )
    return device.executor.runner


def decode_step(
    seq: int, *, logprobs: LogprobOptions | None = None, new_pages: tuple[int, ...] = (), prompts: int = 0
) -> Plan:
    """`prompts`: requests that begin with 70 tokens."""
    items = [
        PlanItem(
            rid=str(slot),
            slot=slot,
            tokens=[1] * 70 if slot < prompts else [-(slot + 1)],
            start=0 if slot < prompts else 20 + seq,
            page_start=2 if new_pages and seq else 0,
            new_pages=list(new_pages),
            sample=True,
            output_len=seq,
            extend=slot < prompts,
            logprobs=logprobs,
        )
        for slot in range(BATCH)
    ]
    return Plan(seq=seq, extend=prompts > 0, items=items)


def launches_of(
    recorder: Recorder, runner: ModelRunner, sampling: SamplingParams, make_step: Callable[[int], Plan]
) -> Counter[str]:
    """Of the second step: the first one opens the slots."""
    first = decode_step(0, new_pages=(1, 2))
    first.opens = [SlotOpen(slot, sampling, [3, 4], [5], (2,)) for slot in range(BATCH)]
    with recorder, torch.no_grad():  # inference mode would hide what composite operations do
        runner.run(first)
        recorder.launches.clear()
        runner.run(make_step(1))
    return recorder.launches


LAUNCHES = 4  # of any kind, copies included: the graph's input, the graph, tokens and marks of bad rows


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_launches_no_more_than_stated(recorder: Recorder, runner: ModelRunner, kind: str) -> None:
    launches = launches_of(recorder, runner, KINDS[kind], decode_step)
    assert launches["graph"] == 1
    assert sum(launches.values()) <= LAUNCHES, launches


LAYER = {
    "rms_norm_kernel": 2,
    "aten.linear.default": 4,
    "rope_write_kernel": 1,
    "decode_split_kernel": 1,
    "gate_kernel": 1,
}
EXPERTS = dict.fromkeys(("route_kernel", "sort_kernel", "up_kernel", "down_kernel", "sum_kernel"), 1)
MIXTURES = {"qwen3_moe": 12, "gpt_oss": 12, "glm4_moe": 15, "deepseek_v2": 24}  # launches of a layer


def test_a_layer_adds_no_more_to_a_graph_than_stated(recorder: Recorder, model_config: ModelConfig) -> None:
    assert added_by_a_layer(recorder, model_config) == LAYER


def added_by_a_layer(recorder: Recorder, config: ModelConfig) -> Counter[str]:
    counts = []
    for num_layers in (2, 3):
        recorder.recorded.clear()
        build(recorder, replace(config, num_layers=num_layers))
        counts.append(recorder.recorded[0])
    return counts[1] - counts[0]


@pytest.mark.parametrize("family", MIXTURES)
def test_a_layer_of_experts_adds_no_more_than_stated(
    recorder: Recorder, tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    config = load_model_config(make_tiny_checkpoint(tmp_path_factory.mktemp(family), family, num_hidden_layers=3))
    added = added_by_a_layer(recorder, config)
    assert {name: added[name] for name in EXPERTS} == EXPERTS
    assert sum(added.values()) <= MIXTURES[family], added


def test_a_drafter_reads_inside_the_graph_that_was_replayed(recorder: Recorder, model_config: ModelConfig) -> None:
    """EAGLE-3's inputs are those of the step's rows, whatever graph was recorded last."""
    runner = build(recorder, model_config, watched=(0, 1))
    model, whole = runner.running.model, decode_step(0, new_pages=(1, 2))
    whole.opens = [SlotOpen(slot, GREEDY, [3, 4], [5], (2,)) for slot in range(BATCH)]
    for seq, rows in enumerate((BATCH, 3, 40)):
        plan = replace(decode_step(seq), items=decode_step(seq).items[:rows]) if seq else whole
        with recorder, torch.no_grad():
            runner.run(plan)
        assert [len(x) for x in model.seen_inside()] == [rows, rows]
    assert recorder.launches["graph"] == 3


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
