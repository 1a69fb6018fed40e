"""Speculation for models with recurrent states: drafts that are right, wrong, or both, leave the bits of every token as they are."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.device.step_memory import EngineUse
from engine.executor import decode_tapes
from engine.kernels.linear import linear_kernel
from engine.kernels.tape import tape_library
from tests.cells import in_turn, some
from tests.engine.drafts.drafters import KINDS, Answers, always, ask_all, draft_from, fared
from tests.engine.drafts.test_speculation import in_grammar
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.ranks_in_process import ranks
from tests.engine.test_recurrent import states_at
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.one_thread import Plays

pytestmark = pytest.mark.skipif(linear_kernel() is None, reason="products of torch depend on the batch")
LENGTH, MOST = 78, 4  # of prompts: a chunk and a snapshot end inside
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # whose steps can be tapes
    "delta": ("qwen3_5_text", {"head_dim": 32}),
    "mamba": ("granitemoehybrid", {"head_dim": 32, "num_local_experts": 0}),
    "beside attention": ("falcon_h1", {"head_dim": 32}),
}
WAYS: dict[str, dict[str, Any]] = {
    "without tapes": {"disable_cuda_graph": True},
    "chunked": {"chunked_prefill_size": 64, "max_running_requests": 4},
    "overlapped": {"stream": "threaded", "stream_delay_s": 0.001},
    "retracted": {"test_retract": 5, "use": EngineUse(retracted_kv="host")},
    "few slots": {"max_mamba_cache_size": 3},
    "pages of 4": {"page_size": 4},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("hybrids")
    return {
        name: make_tiny_checkpoint(folder / family, family, dtype="bfloat16", **fields)
        for name, (family, fields) in FAMILIES.items()
    }


@pytest.fixture(scope="module")
def plain(paths: dict[str, str]) -> dict[str, Answers]:
    return {name: answers(path) for name, path in paths.items()}


def answers(path: str, right: Answers | None = None, kind: str = "", **flags: Any) -> Answers:
    """With drafts as `kind` says of the `right` answers; ""; without."""
    if right is not None:
        flags |= {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1 + MOST}
    with EngineInProcess(path, **flags) as engine:
        if right is not None:
            draft_from(engine.parts.scheduler, right[0], kind, most=MOST)
        said = ask_all(engine, length=LENGTH)
        how = fared(engine)
        assert (how.drafts > 100) == (right is not None)
        assert how.accepted == {"right": how.drafts, "wrong": 0}.get(kind, how.accepted)
        return said


@pytest.mark.parametrize(("name", "kind"), in_turn([*FAMILIES], KINDS))
def test_answers_are_those_of_plain_decoding(
    paths: dict[str, str],
    plain: dict[str, Answers],
    name: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    plays: Plays,
) -> None:
    """By tapes, too, whose products stay until states go back."""
    monkeypatch.setattr(decode_tapes, "OFTEN", 2)
    assert answers(paths[name], plain[name], kind) == plain[name]
    lasting = [tape for _, tape in plays if tape._num_lasting]
    often = kind in ("wrong", "half") and tape_library() is not None
    assert not often or len(lasting) > 1, "states went back from what tapes had kept: the first play is a check"


@pytest.mark.parametrize("way", WAYS)
def test_whatever_else_happens(paths: dict[str, str], plain: dict[str, Answers], way: str) -> None:
    assert answers(paths["delta"], plain["delta"], "mixed", **WAYS[way]) == plain["delta"]


@pytest.mark.parametrize("name", some(FAMILIES, tried=["delta", "beside attention"]))
def test_ranks_take_back_their_own_parts(paths: dict[str, str], name: str) -> None:
    flags = {"tp_size": 2, "reduce_units": 2, "num_threads": 1}
    with ranks(paths[name], **flags) as group:
        wanted = ask_all(group.engine, length=LENGTH)
    flags |= {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1 + MOST}
    with ranks(paths[name], **flags) as group:
        draft_from(group.engine.parts.scheduler, wanted[0], "mixed", most=MOST)
        assert ask_all(group.engine, length=LENGTH) == wanted
        how = fared(group.engine)
        assert 0 < how.accepted < how.drafts


def test_the_next_turn_of_a_chat_goes_on_from_a_verified_answer(paths: dict[str, str]) -> None:
    """The snapshot after 256 tokens has the bits of plain decoding's, and the next turn begins there, whatever was drafted across it."""
    prompt, more = prompt_of(70, 5), prompt_of(9, 6)
    flags: dict[str, Any] = {"page_size": 4, "max_total_tokens": 2048}
    with EngineInProcess(paths["delta"], **flags) as engine:
        engine.answer("turn", prompt, max_new_tokens=200)
        turn, kept = list(engine.tokens["turn"]), states_at(engine, 256)
        wanted = engine.answer("next", [*prompt, *turn, *more], max_new_tokens=12)
    drafting = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}
    for kind in KINDS:
        with EngineInProcess(paths["delta"], **flags, **drafting) as engine:
            draft_from(engine.parts.scheduler, {"turn": turn, "next": wanted}, kind, most=7)
            engine.answer("turn", prompt, max_new_tokens=200)
            for one, other in zip(states_at(engine, 256), kept, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
            engine.answer("next", [*prompt, *turn, *more], max_new_tokens=12)
            assert engine.cached["next"] == 256 and engine.tokens["next"] == wanted


def test_a_model_of_its_own_drafts_for_one_with_states(
    paths: dict[str, str], plain: dict[str, Answers], tmp_path: Path
) -> None:
    other = make_tiny_checkpoint(tmp_path, "llama", seed=1, num_hidden_layers=2, dtype="bfloat16")
    for name in FAMILIES:
        by_model = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": other}
        with EngineInProcess(paths[name], **by_model) as engine:
            always(engine.parts.scheduler)
            assert ask_all(engine, length=LENGTH) == plain[name]
            how = fared(engine)
            assert how.passes > 0 and 0 < how.accepted < how.drafts


def test_what_a_grammar_forces_takes_fewer_steps(paths: dict[str, str]) -> None:
    """Without the flag; of eight requests at once at most, for whose states there is room."""
    wanted, steps = in_grammar(paths["delta"], grammar_backend="none")
    said, fewer = in_grammar(paths["delta"])
    assert said == wanted and fewer < 0.7 * steps
