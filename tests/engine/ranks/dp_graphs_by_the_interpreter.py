"""Run by test_dp_by_groups.py with TRITON_INTERPRET=1 (it must be set before kernels are defined).

DP ranks that record their decode steps and exchange rows by groups, as on GPUs, beside an engine without either. Graphs are eager ones: the
same work over the same buffers, each time anew.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from benchmarks import random_model
from engine.kernels.triton import sample
from tests.engine.device.graphs_by_the_interpreter import LENGTHS, UNCACHED, CountingCapture, plain_engine
from tests.engine.drafts.drafters import always
from tests.engine.ranks.dp_in_process import dp_ranks
from tests.engine.ranks.rank_graphs_by_the_interpreter import check, one_at_a_time
from tests.engine.three_requests import PROMPTS, run, two_models
from tests.models.tiny_checkpoints import make_tiny_checkpoint


def main() -> None:
    torch.set_num_threads(1)
    sample.PARTS, sample.TILE, sample.ROW_TILE = 1, 256, 256
    one_at_a_time()
    with tempfile.TemporaryDirectory(prefix="tandem-graphs-") as folder:
        random_model.HEADS, random_model.KV_HEADS = 4, 2  # the interpreter is slow
        model, _ = two_models(Path(folder), layers=1, hidden=64, intermediate=64)
        check_model(model)
        drafts = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": model}
        check_model(model, **drafts, speculative_num_steps=2, speculative_eagle_topk=2)
        mixture = make_tiny_checkpoint(Path(folder) / "experts", "qwen3_moe", num_hidden_layers=1)
        check_model(mixture, ep_size=2)


def check_model(model: str, **flags: Any) -> None:
    """The second DP rank has three requests. The first has one, then none: it replays graphs of the other's sizes with padding.

    Ranks count the tokens of all experts, without padding.
    """
    with plain_engine(model, **UNCACHED) as plain:
        expected = run(plain, LENGTHS)
        plain.answer("short", PROMPTS["a"], max_new_tokens=2)
        short = expected[0].pop("short")
        loads = plain.parts.executor.runner.expert_loads()
    captures: list[CountingCapture] = []

    def capture() -> CountingCapture:
        captures.append(CountingCapture())
        return captures[-1]

    given: dict[str, Any] = {"stream": "threaded", "attention_backend": "triton", **UNCACHED, **flags}
    with dp_ranks(model, tp_size=2, dp_size=2, by_groups=True, capture=capture, **given) as group:
        first, second = group.engines
        if "speculative_algorithm" in flags:
            always(second.parts.scheduler)
        first.add("short", PROMPTS["a"], max_new_tokens=2)
        found = run(second, LENGTHS, turn=group.run)
        # behind all steps: the first rank may still replay one for the second, which has ended
        executors = [engine.parts.executor for engine in group.engines]
        counted = [executor.call(executor.runner.expert_loads) for executor in executors]
    check(found, expected)
    assert first.tokens["short"] == short
    assert counted == [loads, loads], (counted, loads)
    replays = [capture.steps for capture in captures if capture.steps]  # a drafter's are a DP rank's own
    assert len(replays) == 2 and replays[0] == replays[1] > 2, replays


if __name__ == "__main__":
    main()
    sys.exit(0)
