"""Run by test_draft_graphs.py with TRITON_INTERPRET=1 (it must be set before kernels are defined).

Engines with drafters whose passes are recorded (eager graphs: the same work over the same buffers, each time anew) beside the same
ones without graphs: tokens, drafts, and all that lies in pages are equal. Overlapped steps find in their graph where they begin, behind
drafts that the host has not judged, and what these are.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from engine.device.step_memory import LocalMachine
from engine.executor.graphs import T
from engine.kernels.triton import sample
from engine.speculative.draft_steps import DraftSteps
from tests.engine.drafts.drafters import Fared, always, fared
from tests.engine.drafts.test_eagle import by
from tests.engine.drafts.test_overlapped_drafts import OVERLAPPED, ahead, plans_of, unseen
from tests.engine.engine_in_process import EngineInProcess
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.models.tiny_drafters import make_tiny_eagle

# Few tokens are likely, so that some drafts are right; answers of other lengths end in steps of fewer passes.
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_new_tokens": 7},
    "coin": {"temperature": 1.0, "logit_bias": {30: 40.0, 31: 40.0}, "max_new_tokens": 13},
    "short": {"temperature": 1.0, "top_k": 2, "logit_bias": {40: 40.0}, "max_new_tokens": 3},
}
FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "max_running_requests": 3,
    "max_total_tokens": 160,
    "page_size": 4,
    "disable_radix_cache": True,
    "attention_backend": "triton",
    "speculative_num_steps": 3,
}


def main() -> None:
    torch.set_num_threads(1)
    sample.PARTS, sample.TILE, sample.ROW_TILE = 1, 256, 256
    with tempfile.TemporaryDirectory(prefix="tandem-drafts-") as path:
        folder = Path(path)
        deep, other, flat, moved = (
            make_tiny_checkpoint(folder / f"{layers} {seed}", "qwen3", seed=seed, num_hidden_layers=layers)
            for layers in (3, 1)
            for seed in (0, 1)
        )
        inside: dict[str, Any] = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}
        eagle, eagle3 = make_tiny_eagle(folder / "1", "EAGLE"), make_tiny_eagle(folder / "3", "EAGLE3", **inside)
        layer: dict[str, Any] = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
        mtp = make_tiny_checkpoint(folder / "mtp", "glm4_moe", **layer)
        trees, chains = (
            by("EAGLE", eagle, speculative_eagle_topk=2, speculative_num_draft_tokens=5),
            by("EAGLE3", eagle3),
        )
        for flags in ({}, OVERLAPPED):
            check(flat, moved, **trees, **flags)
            check(deep, other, **chains, **flags)
        check(flat, flat, right=True, **by("STANDALONE", flat), **OVERLAPPED)
        check(mtp, mtp, prefills=True, speculative_algorithm="NEXTN")


class KindsCapture:
    """Does the work anew, counted by the kinds of graphs. `warms`: also before it is recorded, as CUDA's warm-ups do."""

    def __init__(self, *, warms: bool) -> None:
        self.replays: Counter[str] = Counter()
        self._warms = warms

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        if self._warms:
            work()

        def replay() -> T:
            out = work()
            kind = {tuple: "steps", torch.Tensor: "drafts"}.get(type(out), "accepts")
            self.replays[kind] += 1
            return out

        return replay


def check(model: str, other: str, *, prefills: bool = False, right: bool = False, **drafter: Any) -> None:
    """`right`: every draft is."""
    capture = KindsCapture(warms=not prefills)
    machine = LocalMachine(capture=lambda: capture, prefills=prefills)
    with (
        EngineInProcess(model, **FLAGS, disable_cuda_graph=True, **drafter) as eager,
        EngineInProcess(model, machine=machine, **FLAGS, **drafter) as engine,
    ):
        plans, expected = plans_of(engine), asked(eager, other)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DraftSteps, "run", not_in_graphs)
            found = asked(engine, other)
        assert found == expected, (drafter, found, expected)
        how, counters = found[1], engine.parts.scheduler.counters
        assert 0 < how.accepted <= how.drafts and (how.accepted == how.drafts) == right and how.passes, how
        assert capture.replays["drafts"] == how.passes and capture.replays["accepts"] == counters.verify_steps
        steps = counters.steps - how.passes - (0 if prefills else counters.prefill_steps)
        assert capture.replays["steps"] == steps, (capture.replays, counters)
        kept, of_eager = (each.parts.pool.buffer.view(torch.float32).view(1 + 40, -1)[1:] for each in (engine, eager))
        torch.testing.assert_close(kept, of_eager, rtol=1e-4, atol=1e-4)
        overlaps, chains = "stream" in drafter, "speculative_eagle_topk" not in drafter
        assert (ahead(plans) > 1, unseen(plans) > 1) == (overlaps, overlaps and chains), (ahead(plans), unseen(plans))


def not_in_graphs(*_: object) -> Any:
    raise AssertionError("a pass was launched kernel by kernel")


def asked(engine: EngineInProcess, other: str) -> tuple[dict[str, list[int]], Fared]:
    """Tokens of `ASKED`, amid which the weights become those of `other`."""
    always(engine.parts.scheduler)
    for number, (rid, sampling) in enumerate(ASKED.items()):
        engine.add(rid, [20 + i * i % 11 for i in range(5 + number)], seed=3 + number, **sampling)
    while len(engine.tokens.get("coin", [])) < 3:
        engine.turn()
    engine.paused = True
    while engine.pipeline.num_launched:
        engine.turn()
    engine.paused = False
    assert len(engine.tokens["greedy"]) < 7, "an answer goes on in other weights"
    weights = engine.parts.weights
    weights.take(weights.read(other, when_done=lambda: None).result(60.0), model_path=other, version="next")
    engine.run()
    return engine.tokens, fared(engine)


if __name__ == "__main__":
    main()
    sys.exit(0)
