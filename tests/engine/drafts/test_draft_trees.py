"""Trees of drafts: answers are those of plain decoding to the bit; where the second guess is right, its path counts like any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.device.step_memory import EngineUse
from engine.model_files.model_config import WIDE_MODEL_PATH
from engine.speculative.draft_steps import DraftPaths, Passes, PassRows
from engine.speculative.drafts import Draft, Drafts
from tests.core.guesses import drafting_of
from tests.engine.drafts.drafters import always, answers_to, fared
from tests.engine.drafts.test_eagle import NEW, PROMPTS, RIGHT
from tests.engine.drafts.test_standalone_drafter import answers, by
from tests.engine.engine_in_process import EngineInProcess
from tests.engine.ranks.ranks_in_process import engine_of
from tests.models.recall_drafters import build
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.models.tiny_drafters import make_tiny_eagle

TOPK, STEPS = 2, 4
PROMPT = [20 + i * i % 11 for i in range(50)]


def all_of_a_tree(scheduler: Scheduler) -> None:
    """Verify as much of each tree as a step takes, the first guesses as the most likely path."""
    always(scheduler)
    drafting_of(scheduler)._chances.of_tokens = in_order  # type: ignore[method-assign]


def in_order(request: Request, draft: Draft) -> list[float]:
    return [0.99 - 0.01 * i for i in range(len(draft))]


@pytest.fixture
def second_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A right drafter's first guess is wrong in every other pass, and its second one right; it is surer of what is right."""
    original = Passes._guesses

    def exchanged(passes: Passes, drafter: Any, out: Tensor, paths: DraftPaths, rows: PassRows, lengths: Any) -> Any:
        tokens, confidences = original(passes, drafter, out, paths, rows, lengths)
        confidences[..., 0], confidences[..., 1] = 0.6, 0.4
        if (int(paths.starts[0]) + rows.number) % 2:
            tokens, confidences = tokens.flip(2), confidences.flip(2)
        return tokens, confidences

    monkeypatch.setattr(Passes, "_guesses", exchanged)


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


def kept_by_drafter(model: str, eagle: str, topk: int) -> tuple[list[int], Tensor, Tensor]:
    """(tokens, K and V of the drafter's layer, tails) of all whole pages of an answer."""
    flags = trees(eagle, speculative_eagle_topk=topk, page_size=4)
    with EngineInProcess(model, **flags) as engine:
        all_of_a_tree(engine.parts.scheduler)
        (tokens,) = answers_to(engine, [PROMPT], new=NEW)
        memory, pool = engine.parts.scheduler.memory, engine.parts.pool
        pages = torch.tensor(memory.cache.match(PROMPT + tokens).pages)
        assert pool.drafter is not None and pool.tails is not None and len(pages) > 20
        entries = torch.stack((pool.drafter.k(0)[pages], pool.drafter.v(0)[pages]))
        return tokens, entries, pool.tails[pages]


@pytest.mark.parametrize("seed", range(4))  # of a model: not each one takes a path beside the first
def test_what_the_drafter_keeps_is_that_of_chains(tmp_path: Path, seed: int) -> None:
    """An entry follows from the row that samples its token, which in a tree is not always the one before."""
    model = make_tiny_checkpoint(tmp_path / "model", "qwen3", seed=seed, dtype="bfloat16")
    eagle = make_tiny_eagle(tmp_path / "eagle", "EAGLE", dtype="bfloat16")
    of_chains, of_trees = (kept_by_drafter(model, eagle, topk) for topk in (1, 4))
    assert of_chains[0] == of_trees[0]
    assert torch.equal(of_chains[1], of_trees[1]) and torch.equal(of_chains[2], of_trees[2])


def test_each_guess_follows_its_own_path(tmp_path: Path) -> None:
    """The drafter is the model itself, so its best guess behind a path is what plain decoding says there."""
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3", dtype="bfloat16")
    with EngineInProcess(path, **by(path, speculative_eagle_topk=3)) as engine:
        all_of_a_tree(engine.parts.scheduler)
        engine.add("r", PROMPT, max_new_tokens=30)
        while not (request := next(iter(engine.parts.scheduler.stages.live.values()))).of(Drafts).draft.tokens:
            engine.turn()
        draft, known = request.of(Drafts).draft, request.tokens(0, request.num_tokens)
        engine.run()
    paths: list[list[int]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    best = [paths[draft.children(parent)[0]] for parent in dict.fromkeys(draft.parents)]
    with EngineInProcess(path) as plain:
        said = answers_to(plain, [known + path[:-1] for path in best], new=1)
    assert max(map(len, best)) == STEPS and [[path[-1]] for path in best] == said
