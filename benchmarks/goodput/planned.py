"""What `tandem plan` says of a layout under a load, from what calibrate.py measured. The requests are those that are sent."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import msgspec

from benchmarks.goodput.calibrate import Calibration
from benchmarks.goodput.layouts import Layout, Pinning
from benchmarks.goodput.loads import of_a_run
from planner.config import PlanConfig
from planner.goodput import Point, Search, SloTargets, point_of
from planner.layout import parse_layout
from planner.profile import Profile
from planner.study import Study, guess_rate, planned_cluster, run_study, study_of
from planner.workload import PlannedRequest
from router.choice.way_costs import Objectives

NEAR = 1.03  # of a planned search: runs are cheap
COPY_GB_S = 5.0  # of a transfer within a machine, where it was too fast to be seen
CHUNK = 1024  # --chunked-prefill-size of CPU workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """`kv_tokens`: of a worker. Where `chunk` is asked for: most prompt tokens of a step of a tuned layout."""

    folder: Path
    calibration: Calibration
    kv_tokens: int

    def search(
        self, layout: Layout, where: Pinning, requests: Sequence[PlannedRequest], slo: SloTargets, *, chunk: int
    ) -> tuple[float, Point | None]:
        """Return the planned goodput in requests a second (0: no rate keeps the objectives), and the run there."""
        study = self.study(layout, where, requests, slo, chunk=chunk)
        one = parse_layout(layout.planned)
        search = Search(guess=guess_rate(study, one) * one.num_gpus, share=slo.share, near=NEAR)
        while (rate := search.next_rate()) is not None:
            search.add(planned_point(study, layout, rate))
        return search.estimate, search.best

    def study(
        self, layout: Layout, where: Pinning, requests: Sequence[PlannedRequest], slo: SloTargets, *, chunk: int
    ) -> Study:
        found = _study(
            self.folder, self._profile(layout), self._config(layout, where, chunk if layout.tuned else CHUNK)
        )
        wanted = Objectives(slo.ttft_s, slo.itl_s or slo.tpot_s)
        return replace(found, slo=slo, requests=requests, history=(), costs=replace(found.costs, wanted=wanted))

    def _profile(self, layout: Layout) -> Profile:
        if layout.is_unified or layout.shared:
            return self.calibration.whole
        return self.calibration.by_layers if layout.layerwise else self.calibration.half

    def _config(self, layout: Layout, where: Pinning, chunk: int) -> PlanConfig:
        request_s, token_s = self._beside(layout)
        return PlanConfig(
            model_path=str(self.folder / "model"),
            gpu_profile=str(self.folder / "profile.json"),
            max_total_tokens=self.kv_tokens,
            page_size=16,
            chunked_prefill_size=CHUNK,
            mixed_chunk_size=chunk,
            max_running_requests=64,
            transfer_gb_s=_unseen_gb_s(self._profile(layout)),
            disable_overlap_schedule=True,  # an inline stream has nothing to overlap
            host_cores=len(where.cores),
            step_cores=where.threads,
            worker_cores=None if layout.is_unified or layout.shared else where.threads,
            host_request_time_s=request_s,
            host_token_time_s=token_s,
        )

    def _beside(self, layout: Layout) -> tuple[float, float]:
        """CPU seconds of a request and a token that the step times lack: those on all cores were measured with the client there, too."""
        if layout.is_unified:
            return 0.0, 0.0
        router, client = self.calibration.router, self.calibration.client
        return router if layout.shared else (router[0] + client[0], router[1] + client[1])


def planned_point(study: Study, layout: Layout, rate: float) -> Point:
    study = replace(study, requests=of_a_run(study.requests, rate))
    cluster = planned_cluster(study, parse_layout(layout.planned))
    records = run_study(study, cluster, rate)
    return point_of(records, rate=rate, slo=study.slo, busy={}, step_tokens=cluster.step_tokens)


def _unseen_gb_s(profile: Profile) -> float | None:
    """Return what to plan with where a hand-over did not grow with its prompt, or was not measured; None: it was seen."""
    return None if profile.handover is not None and profile.handover.token_s else COPY_GB_S


@lru_cache(maxsize=8)
def _study(folder: Path, profile: Profile, config: PlanConfig) -> Study:
    (folder / "profile.json").write_bytes(msgspec.json.encode(profile))
    return study_of(config)
