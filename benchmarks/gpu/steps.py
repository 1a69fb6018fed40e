"""Steps of a model of Qwen3-8B's shape: decode beside the memory's floor and with adapters, prompts beside bf16 products, the gaps."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.engine import STD, Run, Steps, make_engine, random_model
from benchmarks.gpu.target import QWEN3_8B, QWEN3_30B_A3B, TINY, TINY_MIXTURE, Shape, Target
from engine.assembly.parts import EngineParts
from engine.core.plan import Plan
from engine.executor.model_runner import ModelRunner
from engine.executor.passes import StepOutput
from engine.layers.linear import SiteShape
from engine.lora.weights import AdapterWeights, SiteWeights
from engine.models.decoder import DenseDecoder
from service.process.start import spare_what_lives

KERNELS_SHOWN = 14
RANK = 16  # of adapters
SETTLED = 4  # decode steps before the first whose gap counts

Mark = Callable[[], float]  # milliseconds on one axis; on CUDA valid when the stream is done


def decode(target: Target) -> dict[str, Any]:
    """Decode steps back to back, as graphs and launched kernel by kernel; what of a step is which kernel."""
    shape, context = target.pick((QWEN3_8B, 1024), (TINY, 20))
    batches = target.pick((1, 64), (1, 2))
    found: dict[str, Any] = {"context": context, "rows": []}
    flags = {"max_running_requests": max(batches), "max_total_tokens": max(batches) * (context + 32)}
    for graphs in (True, False):
        parts = make_engine(target, shape, context=context + 16, disable_cuda_graph=not graphs, **flags)
        for batch in batches:
            row = _decode_row(target, parts, shape, batch=batch, context=context) | {"graphs": graphs}
            if graphs and not target.small:
                row["kernels"] = _kernels(parts, batch=batch, context=context)
            found["rows"].append(row)
        parts.device.executor.close()
        del parts
        _give_back(target)
    return found


def mixture(target: Target) -> dict[str, Any]:
    """Decode steps of a mixture of experts, as graphs."""
    shape, context = target.pick((QWEN3_30B_A3B, 1024), (TINY_MIXTURE, 20))
    batches = target.pick((1, 8, 64), (2,))
    flags = {"max_running_requests": max(batches), "max_total_tokens": max(batches) * (context + 32)}
    parts = make_engine(target, shape, context=context + 16, **flags)
    rows = [_decode_row(target, parts, shape, batch=batch, context=context) for batch in batches]
    if not target.small:
        rows[-1]["kernels"] = _kernels(parts, batch=batches[-1], context=context)
    parts.device.executor.close()
    return {"layers": shape.layers, "context": context, "rows": rows}


def _decode_row(target: Target, parts: EngineParts, shape: Shape, *, batch: int, context: int) -> dict[str, Any]:
    ms = step_ms(target, parts, Steps(parts, batch=batch, context=context))
    floor_ms = None
    if "copy_gb_s" in target.limits:
        floor_ms = shape.step_bytes(batch=batch, context=context) / target.limits["copy_gb_s"] / 1e6
    return {"batch": batch, "ms": ms, "floor_ms": floor_ms, "of_floor": ms / floor_ms if floor_ms else None}


def prefill(target: Target) -> dict[str, Any]:
    shape, tokens = target.pick((QWEN3_8B, 8192), (TINY, 20))
    flags = {"max_running_requests": 1, "max_total_tokens": tokens + 32, "disable_cuda_graph": True}
    parts = make_engine(target, shape, context=tokens + 16, **flags)
    steps = Steps(parts, batch=1, context=tokens)
    ms = _prefill_ms(parts, steps, repeats=target.pick(5, 1))
    flop = shape.prefill_flop(tokens)
    found = {"tokens": tokens, "ms": ms, "flop": flop, "tflop_s": flop / ms / 1e9}
    found["of_bf16"] = target.share(found["tflop_s"], "bf16_tflop_s")
    if not target.small:
        found["kernels"] = _profiled(parts, steps.prefill, count=1)
    parts.device.executor.close()
    return found


def _prefill_ms(parts: EngineParts, steps: Steps, *, repeats: int) -> float:
    """Return the median milliseconds of a prompt step, from its launch to its results."""
    _collect(parts, steps.prefill())
    times = []
    for _ in range(repeats):
        begin = perf_counter()
        _collect(parts, steps.prefill())
        times.append(1000 * (perf_counter() - begin))
    return median(times)


def short_prompts(target: Target) -> dict[str, Any]:
    """Prompts that a GPU computes faster than the host launches their kernels, as graphs and kernel by kernel."""
    shape, lengths = target.pick((QWEN3_8B, (64, 128, 512)), (TINY, (5,)))
    rows = []
    for graphs in (True, False):
        flags = {"max_running_requests": 1, "max_total_tokens": 1024, "disable_cuda_graph": not graphs}
        parts = make_engine(target, shape, context=1024, **flags)
        for tokens in lengths:
            steps = Steps(parts, batch=1, context=tokens)
            rows.append(
                {"tokens": tokens, "graphs": graphs, "ms": _prefill_ms(parts, steps, repeats=target.pick(20, 1))}
            )
            steps.close()
        parts.device.executor.close()
        del parts
        _give_back(target)
    return {"rows": rows}


class TimedRunner:
    """Notes when each step of the runner that it is put around begins and ends in the stream."""

    def __init__(self, device: torch.device) -> None:
        self._mark = _cuda_marks() if device.type == "cuda" else _clock_mark
        self.steps: list[tuple[bool, Mark, Mark]] = []  # (it is a decode step, begin, end)

    def around(self, runner: ModelRunner) -> "TimedRunner":
        self._runner = runner
        return self

    def run(self, plan: Plan) -> StepOutput:
        begin = self._mark()
        output = self._runner.run(plan)
        self.steps.append((not plan.extend and bool(plan.items), begin, self._mark()))
        return output

    def wait_for_copies(self, seq: int) -> None:
        self._runner.wait_for_copies(seq)

    def close(self) -> None:
        self._runner.close()

    def forward(self, plan: Plan) -> Tensor | None:
        raise AssertionError("a step in two halves: only grammars ask for one")

    def sample(self, plan: Plan, hidden: Tensor | None) -> StepOutput:
        raise AssertionError("a step in two halves: only grammars ask for one")


def _clock_mark() -> Mark:
    now_ms = 1000 * perf_counter()
    return lambda: now_ms


def _cuda_marks() -> Callable[[], Mark]:
    first: list[torch.cuda.Event] = []

    def mark() -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if not first:
            first.append(event)
        return lambda: float(first[0].elapsed_time(event))

    return mark


def gap(target: Target) -> dict[str, Any]:
    """What the device waits between decode steps, driven by the scheduler, at depth 1 and 2: by events around each step.

    A step's begin is when the device comes to the first thing that is enqueued for it; waits within a step (for kernels
    that are not launched yet, which the sampler's are one by one) count as the step's.
    """
    shape, prompt_len = target.pick((QWEN3_8B, 64), (TINY, 4))
    batches, num_steps = target.pick(((1, 8, 32, 128), 60), ((2,), 2 * SETTLED + 2))
    flags = {"max_running_requests": max(batches), "max_total_tokens": max(batches) * (prompt_len + 2 * num_steps + 32)}
    parts = make_engine(target, shape, context=1024, **flags)
    timed = TimedRunner(parts.pool.device)
    [stream] = parts.device.executor.streams
    stream.runner = timed.around(stream.runner)
    rows = [
        _gap_row(parts, timed, batch=batch, depth=depth, prompt_len=prompt_len, num_steps=num_steps)
        for batch in batches
        for depth in (1, 2)
    ]
    parts.device.executor.close()
    return {"rows": rows}


def _gap_row(
    parts: EngineParts, timed: TimedRunner, *, batch: int, depth: int, prompt_len: int, num_steps: int
) -> dict[str, Any]:
    timed.steps.clear()
    spare_what_lives()  # as a worker does
    run = Run(parts, depth=depth)
    for i in range(batch):
        run.add(f"{batch}-{depth}-{i}", prompt=[1 + (i + t) % 500 for t in range(prompt_len)], new_tokens=num_steps)
    begin = perf_counter()
    run.drain()
    wall_ms = 1000 * (perf_counter() - begin)
    found = _gaps(timed, num_steps - 2 * SETTLED)
    return {"batch": batch, "depth": depth, "wall_ms_per_step": wall_ms / num_steps, **found}


def _gaps(timed: TimedRunner, steps: int) -> dict[str, float]:
    """Of `steps` decode steps behind the first few: the gaps between them, the steps themselves, the idle share."""
    marks = [(begin(), end()) for decode, begin, end in timed.steps if decode][SETTLED : SETTLED + steps]
    found = [max(0.0, begin - end) for (_, end), (begin, _) in pairwise(marks)]
    return {
        "gap_p50_us": 1000 * median(found),
        "gap_max_us": 1000 * max(found),
        "step_p50_ms": median(end - begin for begin, end in marks),
        "idle_share": sum(found) / (marks[-1][1] - marks[0][0]),
    }


def adapters(target: Target) -> dict[str, Any]:
    """Decode steps with LoRA adapters beside the same steps without, as graphs; all rows of a batch have one of so many."""
    shape = target.pick(QWEN3_8B, TINY)
    batch, counts = target.pick((64, (0, 1, 8)), (2, (0, 2)))
    context = target.pick(512, 20)
    models: list[DenseDecoder] = []

    def load(*args: Any, **kwargs: Any) -> DenseDecoder:
        models.append(random_model(*args, **kwargs))
        return models[-1]

    parts = make_engine(
        target,
        shape,
        context=context + 16,
        load=load,
        enable_lora=True,
        max_lora_rank=RANK,
        max_loras_per_batch=max(counts),
        max_running_requests=batch,
        max_total_tokens=batch * (context + 32),
    )
    store = parts.device.adapters
    assert store is not None
    sites = [site.shape for site in models[0].linear_sites()]
    for number in range(1, max(counts) + 1):
        store.install(number, random_adapter(sites, dtype=getattr(torch, target.dtype), device=target.device))
    rows = []
    for count in counts:
        of_slots = [1 + slot % count if count else 0 for slot in range(batch)]
        steps = Steps(parts, batch=batch, context=context, adapters=of_slots)
        rows.append({"batch": batch, "adapters": count, "ms": step_ms(target, parts, steps)})
        rows[-1]["of_plain"] = rows[-1]["ms"] / rows[0]["ms"]
    parts.device.executor.close()
    return {"rank": RANK, "context": context, "rows": rows}


def random_adapter(sites: Sequence[SiteShape], *, dtype: torch.dtype, device: torch.device) -> AdapterWeights:
    """Make an adapter that changes every matrix of `sites`."""

    def weights(*shape: int) -> Tensor:
        return STD * torch.randn(shape, device=device).to(dtype)

    made = []
    for site in sites:
        parts, column = [], 0
        for i, size in enumerate(site.rows):
            ranks = slice(i * RANK, (i + 1) * RANK)
            parts.append((slice(column, column + size), ranks, weights(RANK, size)))
            column += size
        made.append(SiteWeights(weights(len(parts) * RANK, site.width), tuple(parts)))
    return AdapterWeights(tuple(made), RANK)


def step_ms(target: Target, parts: EngineParts, steps: Steps) -> float:
    """Return the milliseconds of one of many decode steps that are all launched before the first is waited for.

    That is what the device needs. Closes `steps`.
    """
    many = target.pick(40, 2)
    _collect(parts, steps.decode())
    times = []
    for _ in range(target.pick(3, 1)):
        target.sync()
        begin = perf_counter()
        launches = [parts.device.executor.launch(steps.decode()) for _ in range(many)]
        for launch in launches:
            parts.device.executor.collect(launch)
        times.append(1000 * (perf_counter() - begin) / many)
    steps.close()
    return min(times)


def _kernels(parts: EngineParts, *, batch: int, context: int) -> list[dict[str, Any]]:
    steps = Steps(parts, batch=batch, context=context)
    _collect(parts, steps.decode())
    rows = _profiled(parts, steps.decode, count=5)
    steps.close()
    return rows


def _profiled(parts: EngineParts, plan: Any, *, count: int) -> list[dict[str, Any]]:
    """Microseconds and launches of each kernel in a step, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            _collect(parts, plan())
        torch.cuda.synchronize()
    micros: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name[:90]
            micros[name] += event.time_range.elapsed_us()
            launches[name] += 1
    rows = [
        {"kernel": name, "us": us / count, "launches": launches[name] / count}
        for name, us in micros.most_common(KERNELS_SHOWN)
    ]
    total = {"kernel": "all", "us": sum(micros.values()) / count, "launches": sum(launches.values()) / count}
    return [total, *rows]


def _collect(parts: EngineParts, plan: Any) -> None:
    parts.device.executor.collect(parts.device.executor.launch(plan))


def _give_back(target: Target) -> None:
    if not target.small:
        torch.cuda.empty_cache()
