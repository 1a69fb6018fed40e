"""Ranks that hold parts of one model, as threads over one checkpoint: what they compute together is what one rank computes alone."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kernels.linear import linear_kernel
from engine.kernels.tape import Tape, tape_library
from engine.model_files.model_config import WIDE_MODEL_PATH
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.parallel.rank_steps import RankSteps, answers, by_ranks
from tools.recall import vocab
from tools.recall.oracle import continuation

HAS_KERNELS = linear_kernel() is not None and tape_library() is not None
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="this CPU has no bf16 kernels")

PROMPTS = {0: list(range(20, 100)), 1: [100, 30, 30, 7], 2: [200]}
SCRIPT: list[dict[int, list[int]]] = [
    {0: PROMPTS[0], 1: PROMPTS[1]},
    {2: PROMPTS[2], 0: [50, 51, 52], 1: [9]},
    *({0: [n], 1: [n + 1], 2: [n + 2]} for n in (60, 70, 80, 90)),
]

# What a rank's cuts differ in: KV heads replicated and not, biases of columns and of rows, norms of heads, tied heads, uneven vocabulary.
MODELS = {
    "two_kv_heads": ("qwen3", {"num_key_value_heads": 2}),
    "tied_and_biased": ("llama", {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}),
    "eight_kv_heads": ("qwen2", {"num_key_value_heads": 8, "vocab_size": 275}),
}
# Wide enough that another order of a sum shows in some result.
SIZES = {"num_attention_heads": 8, "head_dim": 32, "hidden_size": 128, "intermediate_size": 832, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("ranks")
    return {
        name: make_tiny_checkpoint(folder / name, family, dtype="bfloat16", **SIZES | overrides)
        for name, (family, overrides) in MODELS.items()
    }


Answers = Sequence[tuple[Tensor, Tensor | None]]


def check_ranks(ranks: Sequence[Answers]) -> None:
    """All ranks hold the same hidden bits, and rank 0 alone has logits."""
    for other in ranks[1:]:
        for (hidden, _), (theirs, none) in zip(ranks[0], other, strict=True):
            assert torch.equal(hidden.view(torch.uint8), theirs.view(torch.uint8)) and none is None


def logits_of(ranks: Sequence[Answers]) -> Tensor:
    """Of all steps, [rows, vocab]."""
    rows = [logits for _, logits in ranks[0] if logits is not None]
    assert len(rows) == len(SCRIPT)
    return torch.cat(rows)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_ranks_compute_what_one_rank_does(paths: dict[str, str], name: str, dtype: str) -> None:
    alone = logits_of(answers(paths[name], 1, SCRIPT, dtype=dtype))
    exact = alone if dtype == "float32" else logits_of(answers(paths[name], 1, SCRIPT, dtype="float32"))
    bound = 1e-4 * float(exact.abs().max()) if dtype == "float32" else 2.0 * float((alone - exact).abs().max())
    for tp_size in (2, 4):
        ranks = answers(paths[name], tp_size, SCRIPT, dtype=dtype)
        check_ranks(ranks)
        assert float((logits_of(ranks) - alone).abs().max()) <= bound, (
            tp_size,
            "beyond what the type's rounding explains",
        )


@needs_kernels
def test_reduce_units_cut_sums(paths: dict[str, str]) -> None:
    """Of a single model the results may round to the same bits."""
    cut = {name: logits_of(answers(path, 1, SCRIPT, reduce_units=4)) for name, path in paths.items()}
    assert any(not torch.equal(cut[name], logits_of(answers(path, 1, SCRIPT))) for name, path in paths.items())


@needs_kernels
@pytest.mark.parametrize("name", MODELS)
def test_with_reduce_units_the_number_of_ranks_changes_no_bit(paths: dict[str, str], name: str) -> None:
    alone = answers(paths[name], 1, SCRIPT, reduce_units=4)
    for tp_size in (2, 4):
        ranks = answers(paths[name], tp_size, SCRIPT, reduce_units=4)
        check_ranks(ranks)
        for (hidden, logits), (theirs, expected) in zip(ranks[0], alone[0], strict=True):
            assert logits is not None and expected is not None
            assert torch.equal(hidden, theirs) and torch.equal(logits, expected), tp_size


@needs_kernels
def test_a_row_does_not_depend_on_its_batch(paths: dict[str, str]) -> None:
    """Each request by itself, whole or token by token behind its first: the logits of its last token."""
    together = answers(paths["two_kv_heads"], 2, [PROMPTS, {0: [60], 1: [61], 2: [62]}])
    ends = [len(ids) for ids in PROMPTS.values()]
    for slot, ids in PROMPTS.items():
        apart = answers(paths["two_kv_heads"], 2, [{slot: ids}, {slot: [60 + slot]}])
        last = sum(ends[: slot + 1]) - 1
        for step, row in ((0, last), (1, slot)):
            whole, own = together[0][step][1], apart[0][step][1]
            assert whole is not None and own is not None and torch.equal(whole[row], own[-1]), (slot, step)


@pytest.fixture
def plays(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """The tapes that were played."""
    played, play = list[Tape](), Tape.play

    def noted(tape: Tape) -> None:
        played.append(tape)
        play(tape)

    monkeypatch.setattr(Tape, "play", noted)
    return played


PLAYS = 3  # of four decode steps the first records


@needs_kernels
@pytest.mark.parametrize("name", MODELS)
def test_decode_steps_of_ranks_are_played_from_tapes(paths: dict[str, str], name: str, plays: list[Tape]) -> None:
    expected = answers(paths[name], 2, SCRIPT)
    assert not plays
    taped = answers(paths[name], 2, SCRIPT, tapes=True)
    assert len(plays) == 2 * PLAYS
    for (hidden, _), (theirs, _) in zip(taped[0] + taped[1], expected[0] + expected[1], strict=True):
        assert torch.equal(hidden, theirs)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_the_wide_model_answers_as_its_oracle(tp_size: int) -> None:
    prompt = vocab.encode("k17 v42 k03 v91 k05 v07 <eos> k17")

    def greedy(steps: RankSteps) -> list[int]:
        """Followers take the tokens from the oracle: they see no logits."""
        expected, tokens, ids = continuation(prompt, 6, ignore_eos=True), list[int](), prompt
        for token in expected:
            logits = steps.logits(steps.step({0: ids})[-1:])
            tokens += [int(logits.argmax())] if logits is not None else []
            ids = [token]
        assert tokens in ([], expected)
        return tokens

    assert len(by_ranks(WIDE_MODEL_PATH, tp_size, greedy)[0]) == 6


def run_stage(steps: RankSteps, received: list[list[Tensor]], *, is_last: bool) -> tuple[list[Tensor], Tensor | None]:
    """Hidden states of each step, and the first one's logits."""
    hidden = [steps.step(new, hidden=of_step) for new, of_step in zip(SCRIPT, received[0], strict=True)]
    return hidden, steps.logits(hidden[0]) if is_last else None


STAGES = [(2, 1), (3, 1), (2, 2)]


@pytest.mark.parametrize(("pp_size", "tp_size"), STAGES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_stages_compute_what_one_stage_does_to_the_bit(
    tmp_path: Path, pp_size: int, tp_size: int, dtype: str, plays: list[Tape]
) -> None:
    path = make_tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True, **SIZES)
    expected = by_ranks(path, tp_size, lambda steps: [steps.step(new) for new in SCRIPT], dtype=dtype)
    logits = by_ranks(path, tp_size, lambda steps: steps.logits(steps.step(SCRIPT[0])), dtype=dtype)[0]
    received = [[None] * len(SCRIPT)] * tp_size
    for stage in range(pp_size):
        run = partial(run_stage, received=received, is_last=stage == pp_size - 1)
        ranks = by_ranks(path, tp_size, run, dtype=dtype, tapes=True, pp_rank=stage, pp_size=pp_size)
        received = [hidden for hidden, _ in ranks]
    assert not HAS_KERNELS or dtype != "bfloat16" or len(plays) == pp_size * tp_size * PLAYS
    assert logits is not None and ranks[0][1] is not None and torch.equal(logits, ranks[0][1])
    for hidden, theirs in zip(received, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(hidden, theirs, strict=True))


def test_a_stage_has_its_layers_of_the_cache_and_of_the_matrices(paths: dict[str, str]) -> None:
    ranks = by_ranks(paths["two_kv_heads"], 4, lambda steps: steps.model, pp_rank=1, pp_size=2)
    for model in ranks:
        assert [spec.num_kv_heads for spec in model.cache_specs()] == [1, 1]
        qkv, out, gate_up, down = [site.shape for site in model.linear_sites()][:4]
        assert qkv.parts[0][0] == "model.layers.2.self_attn.q_proj"
        assert (qkv.width, qkv.rows) == (128, [64, 32, 32]) and (out.width, out.rows) == (64, [128])
        assert (gate_up.width, gate_up.rows) == (128, [208, 208]) and (down.width, down.rows) == (208, [128])
        assert model.other_sites()[0].parts[0][0] == "model.layers.0.self_attn.q_proj"
