"""What speculation does not work with is refused at start, by name."""

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.flags.resolve import resolve
from engine.flags.speculation import passes_of, rows_of_request, topk_of, with_drafter
from engine.model_files.model_config import load_model_config
from service.flags import ConfigError
from tests.models.tiny_checkpoints import make_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.mark.parametrize(
    ("family", "flags", "said"),
    [
        ("qwen3", {"pp_size": 2}, "--speculative-algorithm NGRAM: --pp-size 2 has other tokens in flight; .*--tp-size"),
        ("qwen3_next", {"pp_size": 2}, "--speculative-algorithm NGRAM: --pp-size 2 has other tokens in flight"),
    ],
)
def test_what_does_not_work_is_refused(tmp_path: Path, family: str, flags: dict[str, Any], said: str) -> None:
    path = make_tiny_checkpoint(tmp_path / family, family)
    config = EngineConfig(model_path=path, speculative_algorithm="NGRAM", **flags)
    with pytest.raises(ConfigError, match=said):
        resolve(config, load_model_config(path), cuda=False)


MODEL = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "there"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"speculative_algorithm": "STANDALONE"}, "STANDALONE: needs --speculative-draft-model-path, a small model"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_draft_model_path": "there"},
            "--speculative-draft-model-path there: --speculative-algorithm NGRAM drafts by no model; leave it out",
        ),
        (
            {"speculative_num_steps": 3},
            "--speculative-num-steps 3: --speculative-algorithm is not given, and drafts by no",
        ),
        (
            {"speculative_algorithm": "EAGLE3"},
            "EAGLE3: needs --speculative-draft-model-path, a checkpoint that is trained",
        ),
        (
            {"speculative_algorithm": "NEXTN", "speculative_draft_model_path": "there"},
            "--speculative-draft-model-path there: NEXTN reads layers of the model's own checkpoint; leave it out",
        ),
        (
            {**MODEL, "speculative_num_steps": 3, "speculative_num_draft_tokens": 8},
            "--speculative-num-draft-tokens 8: a step computes the last known token and --speculative-num-steps 3 drafts; give 4",
        ),
        ({**MODEL, "pp_size": 2}, "STANDALONE: --pp-size 2 has other tokens in flight"),
    ],
)
def test_flags_of_drafters_that_contradict_are_refused(checkpoint: str, flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(EngineConfig(model_path=checkpoint, **flags), load_model_config(checkpoint), cuda=False)


@pytest.mark.parametrize(
    ("family", "fields", "flags", "said"),
    [
        ("llama", {"vocab_size": 300}, {}, "its vocabulary has 300 tokens, the model's 272; give a model of the same"),
        (
            "llama",
            {"max_position_embeddings": 512},
            {},
            "has 512 positions, the model's context 4096; give --context-length 512",
        ),
        ("qwen3_next", {}, {}, "recurrent states cannot go back"),
        ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1}, {"tp_size": 2}, "--tp-size 2: does not divide"),
        ("llama", {"num_key_value_heads": 1}, {"kv_units": 2}, "--kv-units 2: does not divide the model's 1 KV heads"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    tmp_path: Path, checkpoint: str, family: str, fields: dict[str, Any], flags: dict[str, Any], said: str
) -> None:
    path = make_tiny_checkpoint(tmp_path / "drafter", family, **fields)
    given = EngineConfig(
        model_path=checkpoint, speculative_algorithm="STANDALONE", speculative_draft_model_path=path, **flags
    )
    model = load_model_config(checkpoint)
    config = resolve(given, model, cuda=False)
    with pytest.raises(ConfigError, match=f"--speculative-draft-model-path {path}: .*{said}"):
        with_drafter(config, model)


def test_experts_of_a_drafter_that_ranks_do_not_divide_are_refused(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", "mixtral")
    drafter = make_tiny_checkpoint(tmp_path / "drafter", "qwen3_moe", num_experts=3)
    flags: dict[str, Any] = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": drafter}
    model = load_model_config(path)
    config = resolve(EngineConfig(model_path=path, tp_size=2, ep_size=2, **flags), model, cuda=False)
    with pytest.raises(
        ConfigError, match=r"--speculative-draft-model-path .*: --ep-size 2: does not divide the model's 3 experts"
    ):
        with_drafter(config, model)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("qwen3_next", "--speculative-eagle-topk 2: a recurrent state follows one path of drafts; give 1"),
        ("deepseek_v32", "--speculative-eagle-topk 2: sparse attention chooses among the tokens of one path; give 1"),
    ],
)
def test_models_whose_drafts_are_chains(tmp_path: Path, family: str, said: str) -> None:
    path = make_tiny_checkpoint(tmp_path / family, family)
    flags: dict[str, Any] = {**MODEL, "speculative_eagle_topk": 2}
    with pytest.raises(ConfigError, match=f"^{said}$"):
        resolve(EngineConfig(model_path=path, **flags), load_model_config(path), cuda=False)


def test_a_drafter_is_named_in_the_signature(tmp_path: Path, checkpoint: str) -> None:
    path = make_tiny_checkpoint(tmp_path / "drafter", "llama", num_hidden_layers=1)
    model = load_model_config(checkpoint)
    given = EngineConfig(model_path=checkpoint, speculative_algorithm="STANDALONE", speculative_draft_model_path=path)
    drafted = with_drafter(resolve(given, model, cuda=False), model)
    own, other = model.signature(), load_model_config(path).signature()
    assert drafted.signature() == f"{own}/drafts by STANDALONE {other}"


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ({}, 5),
        ({"speculative_num_steps": 2}, 3),
        ({"speculative_num_draft_tokens": 8}, 8),
        ({"speculative_num_steps": 2, "speculative_num_draft_tokens": 3, "speculative_eagle_topk": 1}, 3),
        ({"speculative_num_steps": 6, "speculative_eagle_topk": 4}, 16),
        ({"speculative_num_steps": 6, "speculative_num_draft_tokens": 24, "speculative_eagle_topk": 4}, 24),
    ],
)
def test_steps_and_rows_follow_from_one_another(flags: dict[str, Any], rows: int) -> None:
    config = EngineConfig(model_path="m", **MODEL, **flags)
    assert rows_of_request(config) == rows
    if flags.get("speculative_eagle_topk", 1) > 1:
        assert (passes_of(config), topk_of(config)) == (6, 4)
    assert rows_of_request(EngineConfig(model_path="m", speculative_algorithm="NGRAM")) == 32
