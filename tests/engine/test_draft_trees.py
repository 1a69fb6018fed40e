"""Trees of drafts: answers are those of plain decoding to the bit, and a tree yields more tokens a step than its best path alone."""

import pytest

from tests.engine.test_standalone_drafter import Answers, answers, by
from tests.models.tiny_checkpoints import make_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", dtype="bfloat16")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("other"), "llama", seed=1, num_hidden_layers=2, dtype="bfloat16"
    )


@pytest.fixture(scope="module")
def plain(checkpoint: str) -> Answers:
    return answers(checkpoint)[0]


@pytest.mark.parametrize("topk", [2, 4])
def test_trees_of_a_drafter_that_is_mostly_wrong_change_nothing(checkpoint, other, plain, topk) -> None:
    said, how = answers(checkpoint, **by(other, speculative_eagle_topk=topk))
    print(how)
    assert said == plain


@pytest.mark.parametrize("topk", [2, 4])
def test_trees_of_a_right_drafter(checkpoint, plain, topk) -> None:
    said, how = answers(checkpoint, **by(checkpoint, speculative_eagle_topk=topk))
    print(how)
    assert said == plain
