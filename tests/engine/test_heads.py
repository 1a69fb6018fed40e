"""Classifiers and embedding models give transformers' numbers, however a prompt is computed and on two ranks."""

import array
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from engine.model_files.model_config import load_model_config
from tests.engine.engine_in_process import prompt_of
from tests.engine.ranks.ranks_in_process import engine_of
from tests.engine.test_families import WAYS
from tests.models.headless import make_classifier, make_embedding_model

PROMPTS = {f"r{n}": prompt_of(n, n) for n in (1, 16, 70)}


def pooled(path: str, pooling: str, unit: bool, **flags: Any) -> dict[str, torch.Tensor]:
    flags.pop("test_retract", None)  # nothing is decoded
    with engine_of(path, page_size=4, max_total_tokens=1024, **flags) as engine:
        for rid, prompt in PROMPTS.items():
            engine.add(rid, prompt, wanted={"pooling": pooling, "unit": unit, "alone": True}, max_new_tokens=0)
        engine.run()
        assert not any(engine.tokens.values())
        return {rid: torch.tensor(array.array("f", engine.hidden[rid][-1])) for rid in PROMPTS}


def check(path: str, pooling: str, wanted: dict[str, torch.Tensor], *, unit: bool = True) -> None:
    for flags in ({}, *WAYS.values()):
        found = pooled(path, pooling, unit, **flags)
        for rid, vector in wanted.items():
            torch.testing.assert_close(found[rid], vector, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_labels_have_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    path = make_classifier(tmp_path, family, labels=("bad", "good", "odd"))
    theirs = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    wanted = {rid: theirs(torch.tensor([ids])).logits[0] for rid, ids in PROMPTS.items()}
    assert torch.stack([*wanted.values()]).std() > 0.5
    check(path, "labels", wanted)


@pytest.mark.parametrize(
    ("bare", "pooling", "unit"),
    [(True, "lasttoken", True), (False, "lasttoken", False), (False, "mean", True), (False, "mean", False)],
)
@torch.inference_mode()
def test_embedding_models_pool_as_sentence_transformers_do(
    bare: bool, pooling: str, unit: bool, tmp_path: Path
) -> None:
    path = make_embedding_model(tmp_path, bare=bare, pooling=pooling, unit=unit)
    theirs = AutoModel.from_pretrained(path, dtype=torch.float32)
    states = {rid: theirs(torch.tensor([ids])).last_hidden_state[0] for rid, ids in PROMPTS.items()}
    vectors = {rid: rows.mean(0) if pooling == "mean" else rows[-1] for rid, rows in states.items()}
    wanted = {rid: vector / vector.norm() if unit else vector for rid, vector in vectors.items()}
    head = load_model_config(path).head
    check(path, head.pooling, wanted, unit=head.unit)
