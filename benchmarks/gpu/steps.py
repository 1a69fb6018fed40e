"""Steps of engines of real shapes: decode beside the memory's floor, prompts beside bf16 products, gaps, adapters; one engine a shape."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.engine import Run, Steps, experts_reached, make_engine
from benchmarks.gpu.target import QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B, TINY, TINY_MIXTURE, Shape, Target
from engine.assembly.parts import EngineParts
from engine.core.plan import Plan
from engine.device.graphs import prefill_sizes
from engine.executor.model_runner import ModelRunner
from engine.executor.passes import StepOutput
from engine.layers.linear import SiteShape
from engine.lora.weights import AdapterWeights, SiteWeights
from service.process.start import spare_what_lives

KERNELS_SHOWN = 14
STD = 0.02
RANK = 16  # of adapters
SETTLED = 4  # decode steps before the first whose gap counts
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 1024

Mark = Callable[[], float]  # milliseconds on one axis; on CUDA valid when the stream is done


def engine8b(target: Target) -> dict[str, Any]:
    """Everything of one engine of Qwen3-8B's shape: decode steps, prompts, gaps."""
    parts, found = _figures(target, target.pick(QWEN3_8B, TINY), BATCHES, (64, 128, 512, 1024, 2048, 8192))
    found["kernels"] = {of: _kernels(target, parts, batch=of, context=CONTEXT) for of in (1, 64)}
    found["kernels"]["prompt"] = _kernels(target, parts, context=8192, extend=True)
    target.keep(found)
    found["gap"] = {"rows": gap_rows(target, parts, target.pick((64, 256), (2,)), prompt_len=target.pick(64, 4))}
    parts.device.executor.close()
    return found


def engine06b(target: Target) -> dict[str, Any]:
    """A small model, which a GPU computes faster than a host launches its kernels: also prompts without graphs."""
    shape, lengths = target.pick(QWEN3_06B, TINY), (256, 512, 1024, 2048, 8192)
    parts, found = _figures(target, shape, BATCHES, lengths)
    parts.device.executor.close()
    parts, eager = _figures(target, shape, (1,), lengths[:2], disable_cuda_graph=True)
    parts.device.executor.close()
    return {**found, "eager": eager}


def mixture(target: Target) -> dict[str, Any]:
    """Steps of a mixture of experts, whose rows choose experts of their own."""
    parts, found = _figures(target, target.pick(QWEN3_30B_A3B, TINY_MIXTURE), (1, 8, 64, 256), (1024, 8192))
    found["kernels"] = {of: _kernels(target, parts, batch=of, context=CONTEXT) for of in (1, 64)}
    parts.device.executor.close()
    return found


def _figures(
    target: Target, shape: Shape, batches: Sequence[int], lengths: Sequence[int], **flags: Any
) -> tuple[EngineParts, dict[str, Any]]:
    """An engine, its decode steps back to back, and prompts alone."""
    context, batches, lengths = target.pick((CONTEXT, batches, lengths), (20, (2,), (5, 20)))
    tokens = max(max(batches) * (context + 32), max(lengths) + 32)
    sizes = {"max_running_requests": max(batches), "max_total_tokens": tokens}
    parts = make_engine(target, shape.fields(context=max(*lengths, context) + 64), **sizes, **flags)
    found: dict[str, Any] = {"layers": shape.layers, "decode": {"context": context, "rows": []}}
    for batch in batches:
        found["decode"]["rows"].append(_decode_row(target, parts, shape, batch, context))
        target.keep(found)
    found["prefill"] = {"rows": [_prompt_row(target, parts, shape, tokens) for tokens in lengths]}
    target.keep(found)
    return parts, found


def _decode_row(target: Target, parts: EngineParts, shape: Shape, batch: int, context: int) -> dict[str, Any]:
    ms = step_ms(target, parts, Steps(parts, batch=batch, context=context))
    row: dict[str, Any] = {"batch": batch, "graphs": not parts.config.disable_cuda_graph, "ms": ms, "of_floor": None}
    if "copy_gb_s" in target.limits:
        row["floor_ms"] = shape.step_bytes(batch=batch, context=context) / target.limits["copy_gb_s"] / 1e6
        row["of_floor"] = ms / row["floor_ms"]
    if shape.experts:
        steps = Steps(parts, batch=batch, context=context)
        row["experts"] = experts_reached(parts, lambda: collect(parts, steps.decode()))
        steps.close()
    return row


def _prompt_row(target: Target, parts: EngineParts, shape: Shape, tokens: int) -> dict[str, Any]:
    is_short = tokens <= prefill_sizes(shape.config(context=tokens))[-1]
    steps = Steps(parts, batch=1, context=tokens)
    ms = _prefill_ms(parts, steps, repeats=target.pick(20 if is_short else 5, 1))
    steps.close()
    tflop_s = shape.prefill_flop(tokens) / ms / 1e9
    row = {"tokens": tokens, "graphs": is_short and not parts.config.disable_cuda_graph, "ms": ms, "tflop_s": tflop_s}
    return row | {"of_bf16": target.share(tflop_s, "bf16_tflop_s")}


def _prefill_ms(parts: EngineParts, steps: Steps, *, repeats: int) -> float:
    """Return the median milliseconds of a prompt step, from its launch to its results."""
    collect(parts, steps.prefill())
    times = []
    for _ in range(repeats):
        begin = perf_counter()
        collect(parts, steps.prefill())
        times.append(1000 * (perf_counter() - begin))
    return median(times)


# ---- gaps


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


def gap_rows(
    target: Target, parts: EngineParts, batches: Sequence[int], *, prompt_len: int, depths: Sequence[int] = (1, 2)
) -> list[dict[str, Any]]:
    """What the device waits between decode steps, driven by the scheduler: by events around each step.

    A step's begin is when the device comes to the first thing that is enqueued for it; waits within a step (for kernels
    that are not launched yet, which the sampler's are one by one) count as the step's.
    """
    timed, num_steps = TimedRunner(parts.pool.device), target.pick(60, 2 * SETTLED + 2)
    [stream] = parts.device.executor.streams
    stream.runner = timed.around(stream.runner)
    return [
        _gap_row(parts, timed, batch=batch, depth=depth, prompt_len=prompt_len, num_steps=num_steps)
        for batch in batches
        for depth in depths
    ]


def _gap_row(
    parts: EngineParts, timed: TimedRunner, *, batch: int, depth: int, prompt_len: int, num_steps: int
) -> dict[str, Any]:
    timed.steps.clear()
    spare_what_lives()  # as a worker does
    run = Run(parts, depth=depth)
    for i in range(batch):
        run.add(
            f"{batch}-{depth}-{i}", prompt=[16 + (7 * i + t) % 250 for t in range(prompt_len)], new_tokens=num_steps
        )
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
    parts = make_engine(
        target,
        shape.fields(context=context + 16),
        enable_lora=True,
        max_lora_rank=RANK,
        max_loras_per_batch=max(counts),
        max_running_requests=batch,
        max_total_tokens=batch * (context + 32),
    )
    store = parts.device.adapters
    assert store is not None
    [stream] = parts.device.executor.streams
    sites = [site.shape for site in stream.runner.running.model.linear_sites()]
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
    return AdapterWeights(tuple(made), RANK, digest="")


def step_ms(target: Target, parts: EngineParts, steps: Steps) -> float:
    """Return the milliseconds of one of many decode steps that are all launched before the first is waited for.

    That is what the device needs. Closes `steps`.
    """
    many = target.pick(40, 2)
    collect(parts, steps.decode())
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


def _kernels(
    target: Target, parts: EngineParts, *, batch: int = 1, context: int, extend: bool = False
) -> list[dict[str, Any]]:
    """Microseconds and launches of each kernel in a step, the longest first."""
    if target.small:
        return []
    steps, count = Steps(parts, batch=batch, context=context), 1 if extend else 5
    plan = steps.prefill if extend else steps.decode
    collect(parts, plan())
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            collect(parts, plan())
        torch.cuda.synchronize()
    steps.close()
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


def collect(parts: EngineParts, plan: Any) -> None:
    parts.device.executor.collect(parts.device.executor.launch(plan))
