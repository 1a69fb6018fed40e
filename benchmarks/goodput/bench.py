"""Calibrates, then searches the goodput of each layout under each load on real clusters. What is known already is not done again."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cluster import Cluster
from benchmarks.cpu_use import cpu_use
from benchmarks.goodput import results
from benchmarks.goodput.calibrate import STEP_ANSWERS, Calibration, calibrate, chunk_of
from benchmarks.goodput.clusters import UNFINISHED, pinned, run
from benchmarks.goodput.layouts import Layout, flags_of, pinning
from benchmarks.goodput.loads import Load, of_a_run, to_send
from benchmarks.goodput.results import Cell, Results
from planner.goodput import Point, SloTargets
from planner.workload import PlannedRequest

OTHERS_CORES = 0.25  # a run beside which others took more is taken again, once
TUNED = 0.6  # of the objective for ITL: what a step of a tuned layout may take on average; a shared core is 1.6 times slower at times
GUESS = (
    0.6  # of the requests a second that the cores would serve if they did nothing else: the first rate that is tried
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """`source`: the requests before they are scaled. `cores`, `flags`: of every cluster. `bar`: of tqdm, a tick for each run."""

    cores: Sequence[int]
    flags: tuple[str, ...]
    source: Sequence[PlannedRequest]
    results: Results
    path: Path
    bar: Any

    def begin(self, loads: Sequence[Load], layouts: Sequence[Layout]) -> None:
        """Fix objectives and first guesses before anything is measured."""
        calibration = self.calibration()
        for load in loads:
            if load.name not in self.results.loads:
                self.results.loads[load.name] = self._entry(load, calibration)
            guess = self._guess(load, calibration)
            for layout in layouts:
                if self.results.cell(load.name, layout.name) is None:
                    self.results.cells.append(Cell(load=load.name, layout=layout.name, guess=guess))
        self._write()

    def calibration(self) -> Calibration:
        if self.results.calibration is None:
            found = calibrate(self.flags, self.cores, lambda text: self._say(f"calibrating: {text}"))
            self.results.calibration = msgspec.to_builtins(found)
            self._write()
        return msgspec.convert(self.results.calibration, Calibration)

    def measure(self, layout: Layout, loads: Sequence[Load]) -> None:
        """Search the goodput of a layout under each load; the cluster stays up as long as its flags do."""
        flags: tuple[str, ...] | None = None
        where = pinning(layout, self.cores)
        with ExitStack() as stack:
            cluster: Cluster | None = None
            for load in loads:
                cell = self._cell(load, layout)
                if cell.done:
                    continue
                wanted = flags_of(
                    layout,
                    self.results.slo(load.name),
                    threads=where.threads,
                    chunk=self.results.loads[load.name]["chunk"],
                )
                if wanted != flags or cluster is None:
                    stack.close()
                    self._say(f"starting {layout.name}")
                    flags, cluster = wanted, stack.enter_context(pinned([*self.flags, *wanted], where))
                self._search(cell, cluster, load.requests(self.source))

    # ---- inside

    def _entry(self, load: Load, calibration: Calibration) -> dict[str, Any]:
        requests = load.requests(self.source)
        slo = load.objectives(requests, calibration.alone)
        assert slo.itl_s is not None
        lengths = [(one.input_len, one.output_len) for one in requests]
        return results.load_entry(slo, lengths, chunk=chunk_of(calibration.whole, itl_s=TUNED * slo.itl_s))

    def _guess(self, load: Load, calibration: Calibration) -> float:
        entry, alone = self.results.loads[load.name], calibration.alone
        answer_s = entry["answer_tokens"] * alone.step_s / STEP_ANSWERS
        return GUESS * 2 / (entry["prompt_tokens"] * alone.prompt_token_s + answer_s)

    def _cell(self, load: Load, layout: Layout) -> Cell:
        found = self.results.cell(load.name, layout.name)
        assert found is not None, "begun"
        return found

    def _search(self, cell: Cell, cluster: Cluster, requests: Sequence[PlannedRequest]) -> None:
        slo = self.results.slo(cell.load)
        search = cell.search(slo)
        while (rate := search.next_rate()) is not None:
            point, left = self._run(cell, cluster, requests, slo, rate)
            if left < len(self.cores) - OTHERS_CORES:
                point, left = self._run(cell, cluster, requests, slo, rate)
            search.points.append(point)
            cell.runs.append({"rate": rate, "cores_left": left, "stopped": UNFINISHED in point.errors})
            self._write()
            self.bar.update()
        cell.done = True
        self._write()

    def _run(
        self, cell: Cell, cluster: Cluster, requests: Sequence[PlannedRequest], slo: SloTargets, rate: float
    ) -> tuple[Point, float]:
        """Return what was measured, and the cores that others left."""
        to = to_send(of_a_run(requests, rate), rate=rate, salt=int.from_bytes(os.urandom(6), "big"))
        ended = 0

        def tell() -> None:
            nonlocal ended
            ended += 1
            self._say(f"{cell.load}, {cell.layout}, {rate:.2f}/s: {ended}/{len(to)}")

        with cpu_use() as used:
            point = run(cluster.url, to, rate=rate, slo=slo, tell=tell)
        return point, used.cores_left

    def _say(self, text: str) -> None:
        self.bar.set_postfix_str(text)

    def _write(self) -> None:
        results.write(self.results, self.path)
