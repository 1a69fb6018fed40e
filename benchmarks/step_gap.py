"""Measures how long the executor stands idle between two decode steps, with one step in flight and with two.

An engine without sockets (scheduler, pipeline, executor, model) decodes batches of one size. The gap is the time from the
end of one step's forward and draw to the start of the next, in the executor's stream: by the clock of its thread on a CPU,
by events in the stream on CUDA. There a gap is seen only where the stream has run dry; what the device waits for within a
step (launches that come late) belongs to the step. Share: of all gaps in the time from the first start to the last end.

Depths (engine/loop/pipeline.py): 1, the next step is launched when the results of the last one are read
(`--disable-overlap-schedule`); 2, before. "inline" is the default on a CPU: the scheduler's own thread computes, so its
gap is all that the scheduler does, and nothing can hide it.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from benchmarks.measures import Measure, Row, Tables
from benchmarks.random_model import write_model
from engine.build import EngineParts, build_engine
from engine.config import EngineConfig
from engine.core.plan import Plan
from engine.core.request import Request
from engine.executor.model_runner import ModelRunner
from engine.executor.sample_pass import StepOutput
from engine.loop.pipeline import Pipeline
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config
from engine.sampling_params import SamplingParams

BATCHES = (1, 8, 32, 128)
PROMPT_LEN = 16
FIRST_TOKEN = 32  # ids that any of the models has
SETTLED = 4  # decode steps before the first that counts
WAYS = (("inline", 1), ("threaded", 1), ("threaded", 2))

Mark = Callable[[], float]  # milliseconds on one axis; on CUDA valid when the stream is done


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

    def forward(self, plan: Plan) -> torch.Tensor | None:
        raise AssertionError("a step in two halves: only grammars ask for one")

    def sample(self, plan: Plan, hidden: torch.Tensor | None) -> StepOutput:
        raise AssertionError("a step in two halves: only grammars ask for one")


def _clock_mark() -> Mark:
    now_ms = 1000 * time.perf_counter()
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


def measure(*, layers: int = 28, batches: Sequence[int] = BATCHES, steps: int = 32) -> Tables:
    """On a CPU: the shipped model, and random weights in the shape of Qwen3-0.6B."""
    with tempfile.TemporaryDirectory(prefix="tandem-gap-") as folder:
        write_model(Path(folder), layers=layers)
        models = {"shipped": DEFAULT_MODEL_PATH, "0.6b": folder}
        return {"": [row for name, path in models.items() for row in _rows(name, path, batches, steps)]}


def _rows(name: str, path: str, batches: Sequence[int], steps: int) -> list[Row]:
    """A row for each way and batch."""
    rows: list[Row] = []
    for stream, depth in WAYS:
        config = EngineConfig(
            model_path=path,
            device="cpu",
            stream=stream,
            max_total_tokens=max(batches) * (PROMPT_LEN + steps + 4 * SETTLED + 16),
            max_running_requests=max(batches),
            disable_radix_cache=True,
        )
        parts = build_engine(config, load_model_config(path), progress=False)
        try:
            timed = TimedRunner(parts.pool.device)
            parts.device.executor.runner = timed.around(parts.device.executor.runner)
            for batch in batches:
                timed.steps.clear()
                _decode(parts, depth=depth, batch=batch, steps=steps)
                found = gaps(timed, steps)
                row: Row = {"model, stream": f"{name}, {stream}, depth {depth}", "batch": batch}
                row |= {"step p50, ms": found["step_p50_ms"], "gap p50, us": found["gap_p50_us"]}
                rows.append(row | {"max": found["gap_max_us"], "idle share": f"{100 * found['idle_share']:.1f} %"})
        finally:
            parts.device.executor.close()
    return rows


def _decode(parts: EngineParts, *, depth: int, batch: int, steps: int) -> None:
    pipeline = Pipeline(
        scheduler=parts.scheduler, executor=parts.device.executor, depth=depth, on_step=lambda effects: effects.outputs
    )
    for number in range(batch):
        prompt = [FIRST_TOKEN + (7 * number + 3 * i) % 128 for i in range(PROMPT_LEN)]
        sampling = SamplingParams(max_new_tokens=steps + 2 * SETTLED, temperature=0.0, ignore_eos=True)
        request = Request(rid=f"{number}", input_ids=prompt, sampling=sampling, eos_ids=frozenset(), arrived_s=0.0)
        assert parts.scheduler.add(request) == []
    while (plan := parts.scheduler.schedule(time.monotonic())) is not None or pipeline.num_launched:
        pipeline.advance(plan)


def gaps(timed: TimedRunner, steps: int) -> dict[str, float]:
    """Of `steps` decode steps behind the first few: the gaps between them, the steps themselves, the idle share."""
    marks = [(begin(), end()) for decode, begin, end in timed.steps if decode][SETTLED : SETTLED + steps]
    found = [max(0.0, begin - end) for (_, end), (begin, _) in pairwise(marks)]
    return {
        "gap_p50_us": 1000 * median(found),
        "gap_max_us": 1000 * max(found),
        "step_p50_ms": median(end - begin for begin, end in marks),
        "idle_share": sum(found) / (marks[-1][1] - marks[0][0]),
    }


MEASURES = {
    "step_gap": Measure(
        title="Between two steps",
        about="Time for which the executor's stream has nothing to do between two decode steps, with one step in flight "
        "(depth 1) and with two; one thread computes. Inline is the default on a CPU: the scheduler's own thread "
        "computes, and its work between steps is the gap. `threaded` hides the gap on a core of its own, but both "
        "threads need Python's lock.",
        run=measure,
        quick={"layers": 2, "batches": [1, 8], "steps": 8},
    )
}
