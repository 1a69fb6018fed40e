"""Run by test_ranks_by_groups.py with TRITON_INTERPRET=1 (it must be set before kernels are defined).

Ranks that record their steps and exchange by groups, as on GPUs, beside an engine without either. Graphs are eager ones: the same work
over the same buffers, each time anew. Ranks are threads, and the interpreter runs one kernel at a time.
"""

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from benchmarks import random_model
from engine.kernels.triton import sample
from tests.engine.device.graphs_by_the_interpreter import LENGTHS, UNCACHED, CountingCapture, every_third, plain_engine
from tests.engine.drafts.drafters import fared
from tests.engine.drafts.test_draft_trees import all_of_a_tree
from tests.engine.drafts.test_eagle import by
from tests.engine.drafts.test_overlapped_drafts import ahead, plans_of
from tests.engine.engine_in_process import EngineInProcess
from tests.engine.ranks.ranks_in_process import ranks
from tests.engine.three_requests import PROMPTS, SAMPLING, run, two_models
from tests.models.tiny_drafters import make_eagle_of


def main() -> None:
    torch.set_num_threads(1)
    sample.PARTS, sample.TILE, sample.ROW_TILE = 1, 256, 256
    one_at_a_time()
    with tempfile.TemporaryDirectory(prefix="tandem-graphs-") as folder:
        random_model.HEADS, random_model.KV_HEADS = 4, 2  # the interpreter is slow
        model, other = two_models(Path(folder), layers=2, hidden=64, intermediate=64)
        with plain_engine(model, **UNCACHED) as plain:
            expected, masked = (
                run(plain, LENGTHS),
                run(plain, LENGTHS, grammars={"a": every_third(plain.model.vocab_size)}),
            )
        assert len(masked[0]["a"]) == LENGTHS["a"], "a token without its mask ended the answer"
        with plain_engine(other, **UNCACHED) as plain:
            expected_of_other = run(plain, LENGTHS)
        with recording_ranks(model, tp_size=2) as engine:
            check(run(engine, LENGTHS), expected)
            check(run(engine, LENGTHS, grammars={"a": every_third(engine.model.vocab_size)}), masked)
        passes: dict[str, Any] = {"speculative_num_steps": 2}
        eagle = by("EAGLE", make_eagle_of(model, Path(folder) / "eagle"), speculative_eagle_topk=2, **passes)
        check_drafter(model, disable_overlap_schedule=True, **eagle)
        check_drafter(model, **eagle)
        check_drafter(model, **by("STANDALONE", model, **passes))
        with recording_ranks(model, pp_size=2) as engine:
            check(run(engine, LENGTHS), expected)
            weights = engine.parts.weights
            weights.take(weights.actions.load(other, engine.model, progress=False), model_path=other, version=None)
            check(run(engine, LENGTHS), expected_of_other)


def check_drafter(model: str, **flags: Any) -> None:
    """Both ranks replay the passes of a drafter, trees too, and what a verified step accepts, be it known to the host or not."""
    with plain_engine(model, **UNCACHED) as plain, recording_ranks(model, tp_size=2, **flags) as engine:
        all_of_a_tree(engine.parts.scheduler)
        plans = plans_of(engine)
        for each in (plain, engine):
            each.answer("a", PROMPTS["a"], seed=3, max_new_tokens=14, **SAMPLING["a"])
        assert engine.tokens == plain.tokens and fared(engine).drafts > 0
        assert (ahead(plans) > 0) != ("disable_overlap_schedule" in flags), flags


def one_at_a_time() -> None:
    """Its state is the module's, and the first launch of a kernel parses it."""
    lock, run = threading.RLock(), InterpretedFunction.run

    def locked(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return run(self, *args, **kwargs)

    InterpretedFunction.run = locked


@contextmanager
def recording_ranks(model: str, **own: Any) -> Iterator[EngineInProcess]:
    """Both ranks replay the same graphs, of decode steps and of prompts."""
    captures: list[CountingCapture] = []

    def capture() -> CountingCapture:
        captures.append(CountingCapture())
        return captures[-1]

    flags = {"stream": "threaded", "attention_backend": "triton", **UNCACHED, **own}
    with ranks(model, by_groups=True, capture=capture, **flags) as group:
        yield group.engine
    replays = sorted(capture.replays for capture in captures)
    assert replays[0] > 0 and replays[::2] == replays[1::2], replays


def check(found: Any, expected: Any) -> None:
    """Tokens and their logprobs."""
    assert found[0] == expected[0], (found, expected)
    assert found[1] == pytest.approx(expected[1], rel=0.0, abs=1e-5)


if __name__ == "__main__":
    main()
    sys.exit(0)
