"""Trees of drafts: answers are those of plain decoding to the bit; where the second guess is right, its path counts like any other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.core.drafts import Draft
from engine.core.plan import PlanItem
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.executor.guess_pass import GuessPass
from engine.model_files.model_config import WIDE_MODEL_PATH
from engine.sampler.make import TokenSampler
from engine.use import EngineUse
from tests.engine.drafters import always, answers_to, engine_of, fared
from tests.engine.test_eagle import NEW, PROMPTS, RIGHT
from tests.engine.test_standalone_drafter import answers, by
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tools.recall.drafters import build

TOPK, STEPS = 2, 4


def all_of_a_tree(scheduler: Scheduler) -> None:
    """Verify as much of each tree as a step takes, the first guesses as the most likely path."""
    always(scheduler)
    assert scheduler.drafting is not None
    scheduler.drafting._chances.of_tokens = in_order  # type: ignore[method-assign]


def in_order(request: Request, draft: Draft) -> list[float]:
    return [0.99 - 0.01 * i for i in range(len(draft))]


@pytest.fixture
def second_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A right drafter's first guess is wrong in every other pass, and its second one right; it is surer of what is right."""
    original = GuessPass._sample

    def exchanged(
        passes: GuessPass, sampler: TokenSampler, logits: Tensor, rows: Sequence[PlanItem], number: int, *, into: Tensor
    ) -> None:
        original(passes, sampler, logits, rows, number, into=into)
        into[1, :, 0], into[1, :, 1] = 0.6, 0.4
        if (rows[0].start + number) % 2:
            into[:] = into.flip(2)

    monkeypatch.setattr(GuessPass, "_sample", exchanged)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build("EAGLE", tmp_path_factory.mktemp("right") / "EAGLE")


def trees(path: str, **flags: Any) -> dict[str, Any]:
    own = {"speculative_eagle_topk": TOPK, "speculative_num_steps": STEPS}
    return {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": path, **own, **flags}


WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "small pages": {"page_size": 4, "chunked_prefill_size": 16},
    "mixed": {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
    "overlapped": {"stream": "threaded", "stream_delay_s": 0.001},
    "retracted": {"test_retract": 4, "use": EngineUse(retracted_kv="host")},
    "ranks": {"tp_size": 2, "num_threads": 1, "kv_units": 2},
    "8 bits": {"kv_cache_dtype": "fp8_e4m3", "disable_cuda_graph": True},
}


@pytest.mark.usefixtures("second_guesses")
@pytest.mark.parametrize("way", WAYS)
def test_a_path_beside_the_first_one_counts_and_comes_to_its_place(right: str, way: str) -> None:
    """Each tree has a path that is right, so no pass goes astray: what the steps before left lies where it belongs.

    40 tokens behind the first: seven steps that accept four drafts, and two at the end, where a tree has fewer.
    """
    flags = {"tp_size": 1, **trees(right), **WAYS[way]}
    with engine_of(WIDE_MODEL_PATH, **flags) as engine:
        all_of_a_tree(engine.parts.scheduler)
        assert answers_to(engine, PROMPTS, new=NEW) == RIGHT
        how, counters = fared(engine), engine.parts.scheduler.counters
    assert how.accepted >= len(PROMPTS) * 27 and how.drafts > 2 * how.accepted
    assert counters.verified_runs == len(PROMPTS) * 9 or way in ("small pages", "mixed", "overlapped", "retracted")


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "deepseek_v3"])
def test_any_sampling_gives_the_tokens_of_plain_decoding(tmp_path: Path, family: str) -> None:
    """Windows and latents, too. The drafter is another model, mostly wrong, or the model itself."""
    path = make_tiny_checkpoint(tmp_path / "model", family, dtype="bfloat16")
    other = make_tiny_checkpoint(tmp_path / "other", "llama", seed=1, num_hidden_layers=2, dtype="bfloat16")
    wanted, _ = answers(path)
    for drafter, topk in ((other, 3), (path, 2)):
        said, how = answers(path, **by(drafter, speculative_eagle_topk=topk))
        assert said == wanted and 0 < how.accepted < how.drafts
