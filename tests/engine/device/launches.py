"""Launches of an engine's steps, counted on the meta device in place of a GPU.

Code takes the same ways as there, and nothing has bytes, so a read by the host fails. What torch dispatches is counted, Triton's
launches are counted in place of being made, and a graph's replay does nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config import EngineConfig
from engine.core.plan import Plan, PlanItem, SlotOpen
from engine.device.device import build_device
from engine.device.pools import divided
from engine.device.step_memory import RankSeat, Recording, StepMemory
from engine.executor.executor import InlineStream
from engine.executor.graphs import Work
from engine.executor.model_runner import ModelRunner
from engine.flags.resolve import resolve
from engine.kv.kv_pool import KVPool
from engine.messages import LogprobOptions
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.models.part import ModelPart
from engine.sampling_params import SamplingParams
from tests.engine.device.unread import META, Unread

BATCH, VOCAB = 64, 151_936
GREEDY = SamplingParams(temperature=0.0, seed=1)


MakeDrafter = Callable[[DenseDecoder], Any]  # a DraftModel


class Recorder(TorchDispatchMode):
    """Counts launches and copies; fails where the host would wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.recorded: list[Counter[str]] = []  # of each graph
        self.forms: set[str] = set()  # of packed weights
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


def build(
    recorder: Recorder,
    model_config: ModelConfig,
    *,
    drafter: MakeDrafter | None = None,
    checkpoint: type[Unread] = Unread,
    apart: bool = False,
    **flags: Any,
) -> ModelRunner:
    """`drafter`: makes one for the model. `apart`: layers with a window have a pool of their own.

    Steps are planned ahead as on a GPU, and launched inline.
    """
    config = EngineConfig(device="cuda", max_running_requests=BATCH, max_total_tokens=8192, **flags)
    config = resolve(config, model_config, cuda=True)
    model = DenseDecoder(ModelPart(model_config, checkpoint()))  # type: ignore[arg-type]
    if drafter is not None:
        model.draft_with(drafter(model))
    specs = [replace(spec, fp8=config.kv_cache_dtype == "fp8_e4m3") for spec in model.cache_specs()]
    beside, inside = divided(specs, apart=apart)
    pool, *windows = (KVPool(specs, num_pages=256, page_size=16, device=META) for specs in (beside, inside) if specs)
    with recorder:
        device = build_device(
            config,
            model_config,
            model,
            StepMemory(pool=pool, windows=windows[0] if windows else None),
            records=Recording(decodes=True, capture=lambda: OneLaunch(recorder)),
            seat=RankSeat(),
            stream=InlineStream(),
        )
    return device.executor.runner


def decode_step(
    seq: int,
    *,
    logprobs: LogprobOptions | None = None,
    new_pages: tuple[int, ...] = (),
    new_window: tuple[int, ...] = (),
    prompts: int = 0,
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
            window_start=2 if new_window else 0,
            new_window=list(new_window),
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
