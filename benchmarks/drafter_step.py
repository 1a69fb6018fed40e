"""What a drafter costs beside the model, in one process: a decode step without and with it, a verify step, and a pass.

usage: python -m benchmarks.drafter_step [--layers 28] [--hidden 1024] [--batches 1 8] [--context 512] [--rounds 20]

Model and EAGLE layer are random, so drafts are wrong; costs do not depend on that. Times are CPU time of one thread. The vocabulary is small: a head of 150,000 tokens adds
its own product to each pass.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import random_model
from deploy.bench.report import table
from engine.build import build_engine
from engine.config import EngineConfig
from engine.core.drafts import Chance
from engine.core.plan import Plan
from engine.core.request import Request
from engine.model_files.model_config import load_model_config
from engine.sampling_params import SamplingParams
from tests.models.tiny_drafters import make_eagle_of

STEPS = 4
SURE = 1e30


class Chosen:
    """Costs that choose: `of_row` to the power of a step's rows; less than 1: drafts always pay."""

    def __init__(self, of_row: float) -> None:
        self._of_row = of_row

    def step(self, rows: int) -> float:
        return self._of_row**rows

    def note(self, rows: int, taken_s: float) -> None:
        """Nothing is learned."""


def seconds(path: str, *, batch: int, context: int, rounds: int, drafts: bool, **flags: Any) -> dict[str, float]:
    """Median CPU seconds of each kind of step: "plain", "verify", "draft"."""
    config = EngineConfig(model_path=path, max_total_tokens=batch * (context + 400), num_threads=1, **flags)
    parts = build_engine(config, load_model_config(path), progress=False)
    scheduler, executor = parts.scheduler, parts.executor
    if scheduler.drafting is not None and scheduler.drafting.passes:
        scheduler.drafting.costs = Chosen(0.5 if drafts else 2.0)
        scheduler.drafting.pass_costs = Chosen(0.0)
        scheduler.drafting._chances.of_tokens = lambda request, draft: [1.0] * len(draft)  # type: ignore[method-assign]
    for i in range(batch):
        prompt = [20 + (i * 7 + n * n) % 400 for n in range(context)]
        sampling = SamplingParams(max_new_tokens=390, temperature=0.0, ignore_eos=True, seed=0)
        request = Request(rid=f"r{i}", input_ids=prompt, sampling=sampling, eos_ids=frozenset(), arrived_s=0.0)
        request.drafts.chance = Chance(SURE, SURE)  # whatever becomes of its drafts
        scheduler.add(request)
    taken: dict[str, list[float]] = {}
    kinds = ("verify", "draft") if drafts else ("plain",)
    while min(len(taken.get(kind, ())) for kind in kinds) < rounds:
        plan: Plan | None = scheduler.schedule(0.0)
        assert plan is not None, "the answers ended before all rounds"
        began_s = time.thread_time()
        result = executor.collect(executor.launch(plan))
        spent_s = time.thread_time() - began_s
        scheduler.collect(plan, result)
        if not plan.extend:
            kind = "draft" if plan.only_drafts else "verify" if any(item.draft for item in plan.items) else "plain"
            taken.setdefault(kind, []).append(spent_s)
    executor.close()
    return {kind: median(taken[kind][2:]) for kind in kinds}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafter_step", description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-drafter-") as name:
        path = str(Path(name) / "model")
        random_model.write_model(Path(path), layers=given.layers, hidden=given.hidden)
        eagle = make_eagle_of(path, Path(name) / "eagle")
        own = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": eagle, "speculative_num_steps": STEPS}
        rows = []
        for batch in given.batches:
            common: dict[str, Any] = {"batch": batch, "context": given.context, "rounds": given.rounds}
            plain = seconds(path, **common, drafts=False)["plain"]
            beside = seconds(path, **common, drafts=False, **own)["plain"]
            drafted = seconds(path, **common, drafts=True, **own)
            figures = (plain, beside, drafted["verify"], drafted["draft"] / STEPS)
            rows.append([str(batch), *(f"{1e3 * figure:.1f}" for figure in figures)])
    headings = ["batch", "plain step, ms", "with the drafter, ms", f"verify {STEPS + 1} rows each, ms", "a pass, ms"]
    print(table(headings, rows))


if __name__ == "__main__":
    main()
