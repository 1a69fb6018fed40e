"""How far `tandem plan` is from the truth where n-grams draft: the speed-up of NGRAM on SmolLM2, real and planned.

usage: python -m benchmarks.plan_speculation [--tokens 192] [--rounds 3] [--batches 1 8] [--kinds edit quote foreign] [--output FILE]

The real scheduler and model decode in this process, a step after the other. Times are CPU time of one thread, so other work of the
machine hardly counts, and HTTP does not. The planner gets what its user measures: step times as a line through plain decode steps of 1 to
32 requests, and of the requests one by one how often n-grams match and how often a draft is right (docs/planning.md). Beside the line (a row
costs the same however many there are) stands a plan with the row costs that a worker itself learns (engine/core/row_costs.py): what of the
error is the line's.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
from tqdm import tqdm

from benchmarks.speculation import bodies
from deploy.bench import environment
from deploy.bench.report import table
from engine.build import EngineParts, build_engine
from engine.config import EngineConfig
from engine.core.request import Request
from engine.core.row_costs import RowCosts
from engine.model_files.model_config import load_model_config
from engine.model_files.source import smollm2_file
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import load_tokenizer
from planner.config import PlanConfig
from planner.layout import parse_layout
from planner.profile import Profile
from planner.step_time import Fitted, StepLoad, StepTime
from planner.study import Study, planned_cluster, study_of
from planner.workload import FIRST_OWN, PlannedRequest

LAYOUT = parse_layout("1U")
SIZES, PROMPTS = (1, 2, 4, 8, 16, 32), (64, 768)  # of the batches that step times are fitted to, and of their prompts
FITTED_TOKENS = 12


@dataclass
class Decoded:
    """`steps`: (rows, KV tokens that they read, seconds) of each decode step."""

    tokens: int = 0
    steps: list[tuple[int, int, float]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / sum(seconds for _, _, seconds in self.steps)


class Worker:
    """SmolLM2 in this process. `flags`: of speculation."""

    def __init__(self, **flags: Any) -> None:
        path = str(smollm2_file())
        config = EngineConfig(model_path=path, max_total_tokens=32768, num_threads=1, max_step_time_s=0.0, **flags)
        self.parts: EngineParts = build_engine(config, load_model_config(path), progress=False)

    def decode(self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> Decoded:
        """Answer all at once; steps with a part of a prompt do not count."""
        scheduler, executor, found = self.parts.scheduler, self.parts.executor, Decoded()
        for number, (prompt, one) in enumerate(zip(prompts, sampling, strict=True)):
            scheduler.add(Request(rid=f"r{number}", input_ids=prompt, sampling=one, eos_ids=frozenset(), arrived_s=0.0))
        while (plan := scheduler.schedule(0.0)) is not None:
            began_s = time.thread_time()
            result = executor.collect(executor.launch(plan))
            taken_s = time.thread_time() - began_s
            effects = scheduler.collect(plan, result)
            if plan.extend:
                continue
            if scheduler.drafting is not None:
                scheduler.drafting.note(plan, taken_s)
            found.tokens += sum(len(output.new_ids) for output in effects.outputs)
            found.steps.append((len(plan.items), sum(item.start + 1 for item in plan.items), taken_s))
        return found

    def chances(self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> dict[str, float]:
        """--speculative-accept-rate and --speculative-match-rate, as docs/planning.md says, of requests one by one."""
        counters = self.parts.scheduler.counters
        before, tokens = replace(counters), 0
        for prompt, one in zip(prompts, sampling, strict=True):
            tokens += self.decode([prompt], [one]).tokens
        accepted = counters.accepted_drafts - before.accepted_drafts
        wrong, runs = counters.wrong_drafts - before.wrong_drafts, counters.verified_runs - before.verified_runs
        return {
            "speculative_accept_rate": min(0.999, max(0.001, accepted / max(1, accepted + wrong))),
            "speculative_match_rate": min(1.0, max(0.001, runs / (tokens - accepted))),
        }


@dataclass(frozen=True)
class ByRows:
    """`line`, where a decode step's rows cost what RowCosts has learned."""

    line: Fitted
    costs: RowCosts

    def seconds(self, load: StepLoad) -> float:
        if load.prefill_tokens or not load.decodes:
            return self.line.seconds(load)
        return self.costs.step(load.decodes) + self.line.decode_context_s * load.decode_context


def step_times(worker: Worker) -> tuple[Fitted, ByRows, float]:
    """Return the line through plain decode steps, the same by rows, and the line's median error."""
    steps: list[tuple[int, int, float]] = []
    for size, length in product(SIZES, PROMPTS):
        prompts = [[20 + (i * 7 + n * n) % 400 for n in range(length)] for i in range(size)]
        sampling = [SamplingParams(max_new_tokens=FITTED_TOKENS, temperature=0.0, ignore_eos=True)] * size
        found = worker.decode(prompts, sampling).steps[1:]
        steps.append((size, round(mean(context for _, context, _ in found)), median(s for _, _, s in found)))
    seconds = np.array([s for _, _, s in steps])
    matrix = np.array([[1.0, rows, context] for rows, context, _ in steps])
    step_s, row_s, context_s = np.maximum(
        0.0, np.linalg.lstsq(matrix / seconds[:, None], np.ones(len(steps)))[0]
    ).tolist()
    line = Fitted(
        prefill_step_s=step_s,
        prefill_token_s=0.0,
        prefill_pair_s=0.0,
        decode_step_s=step_s,
        decode_request_s=row_s,
        decode_context_s=context_s,
    )
    costs = RowCosts()
    for rows, context, taken_s in steps:
        costs.note(rows, max(1e-9, taken_s - context_s * context))
    errors = np.abs(matrix @ [step_s, row_s, context_s] / seconds - 1)
    return line, ByRows(line, costs), float(np.median(errors))


def planned(study: Study, requests: Sequence[PlannedRequest], step_time: StepTime) -> tuple[float, float]:
    """Return (output tokens a second, tokens a step) of requests sent at once, whose prompts are cached."""
    study = replace(study, hardware=msgspec.structs.replace(study.hardware, step_times={1: step_time}))
    cluster = planned_cluster(study, LAYOUT)
    cluster.warm(requests)
    records = cluster.run(requests, rate=1e9, until_s=float("inf"))
    tokens = sum(record.output_tokens - 1 for record in records)
    last_s = max(record.sent_s + record.e2e_s for record in records)
    return tokens / (
        last_s - min(record.sent_s + (record.ttft_s or 0.0) for record in records)
    ), cluster.step_tokens or 1.0


def compare(
    off: Worker,
    on: Worker,
    kind: str,
    batch: int,
    *,
    tokens: int,
    rounds: int,
    base: PlanConfig,
    times: dict[str, StepTime],
) -> dict[str, Any]:
    tokenizer = load_tokenizer(smollm2_file())
    asked = bodies(kind, batch, tokens=tokens)
    prompts = [tokenizer.encode(body["text"]) for body in asked]
    sampling = [SamplingParams(**body["sampling_params"]) for body in asked]
    chances = on.chances(prompts, sampling)
    counters = on.parts.scheduler.counters
    before, tokens_on = replace(counters), 0
    rates: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(rounds):
        rates["off"].append(off.decode(prompts, sampling).rate)
        fast = on.decode(prompts, sampling)
        rates["on"].append(fast.rate)
        tokens_on += fast.tokens
    accepted = counters.accepted_drafts - before.accepted_drafts
    row: dict[str, Any] = {"kind": kind, "batch": batch, **chances}
    row["real"] = {name: median(found) for name, found in rates.items()}
    row["real"]["step_tokens"] = tokens_on / (tokens_on - accepted)
    requests = [
        PlannedRequest(at=0.0, blocks=((FIRST_OWN + n, len(prompt)),), output_len=tokens)
        for n, prompt in enumerate(prompts)
    ]
    speculating = replace(base, speculative_algorithm="NGRAM", **chances)
    for name, step_time in times.items():
        slow, _ = planned(study_of(base), requests, step_time)
        rate, step_tokens = planned(study_of(speculating), requests, step_time)
        row[name] = {"off": slow, "on": rate, "step_tokens": step_tokens}
    return row


def render(rows: Sequence[dict[str, Any]], error: float) -> str:
    header = ["answers", "batch", "matched", "right", "real: a step", "speed-up"]
    header += ["planned: a step", "speed-up", "tokens/s", "by rows: a step", "speed-up", "tokens/s"]
    lines = []
    for row in rows:
        line = [
            row["kind"],
            str(row["batch"]),
            f"{row['speculative_match_rate']:.2f}",
            f"{row['speculative_accept_rate']:.2f}",
        ]
        for name in ("real", "line", "rows"):
            found = row[name]
            line += [f"{found['step_tokens']:.2f}", f"{found['on'] / found['off']:.2f}"]
            line += [] if name == "real" else [f"{100 * (found['on'] / row['real']['on'] - 1):+.0f} %"]
        lines.append(line)
    return f"The line through plain decode steps is {100 * error:.0f} % off in the median.\n\n" + table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--kinds", nargs="+", default=["edit", "quote", "foreign"])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    off, on = Worker(), Worker(speculative_algorithm="NGRAM")
    line, by_rows, error = step_times(off)
    with TemporaryDirectory(prefix="tandem-plan-") as folder:
        profile = Path(folder) / "profile.json"
        profile.write_bytes(msgspec.json.encode(Profile(step_time=line, outside_s=0.0)))
        base = PlanConfig(
            model_path=str(smollm2_file()),
            gpu_profile=str(profile),
            transfer_gb_s=1.0,
            max_total_tokens=32768,
            page_size=16,
            chunked_prefill_size=1024,
            num_requests=10,
            input_len=1024,
            disable_overlap_schedule=True,  # an inline stream has nothing to overlap
        )
        cells = [(kind, batch) for kind in args.kinds for batch in args.batches]
        times: dict[str, StepTime] = {"line": line, "rows": by_rows}
        rows = [
            compare(off, on, kind, batch, tokens=args.tokens, rounds=args.rounds, base=base, times=times)
            for kind, batch in tqdm(cells, unit="cell", disable=None)
        ]
    print(render(rows, error))
    if args.output is not None:
        args.output.write_text(json.dumps({"environment": environment.describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
