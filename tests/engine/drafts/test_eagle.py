"""EAGLE, EAGLE-3 and MTP layers: answers are those of plain decoding; drafters that are right accept as many as is known.

The first draft of one that is right needs the model's hidden state before the last known token, which lies in the tail of its page. With
recurrent states the answer needs the one behind the last token that counts, too.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.assembly.leader import build_engine
from engine.config import EngineConfig
from engine.core.mem_cache.host_cache import HostCache
from engine.device.step_memory import EngineUse
from engine.kernels.linear import linear_kernel
from engine.model_files.model_config import WIDE_MODEL_PATH, load_model_config
from service.flags import ConfigError
from tests.cells import in_turn, some
from tests.e2e.workload import recall_prompt
from tests.engine.drafts.drafters import (
    Answers,
    always,
    answers_to,
    ask_all,
    fared,
    spoil_all_but_the_first,
)
from tests.engine.drafts.test_standalone_drafter import answers
from tests.engine.engine_in_process import EngineInProcess
from tests.engine.ranks.ranks_in_process import engine_of, ranks
from tests.models.recall_drafters import build
from tests.models.tiny_checkpoints import HYBRIDS, make_tiny_checkpoint
from tests.models.tiny_drafters import make_tiny_eagle
from tools.recall.build import build as build_model
from tools.recall.oracle import continuation

KINDS = ("EAGLE", "EAGLE3")
NEW = 41


def recalled(shortest: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of `shortest` pairs and more, some of which end with a page and some within, and their answers."""
    draw = random.Random(5)
    prompts = [recall_prompt(draw, shortest + i) for i in range(4)]
    return prompts, [continuation(prompt, NEW, ignore_eos=True) for prompt in prompts]


PROMPTS, RIGHT = recalled(30)


@dataclass(frozen=True)
class Right:
    """A model and a drafter that is right. `chunk`: tokens, fewer than a prompt has."""

    path: str
    flags: Mapping[str, Any]
    chunk: int
    prompts: list[list[int]]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Right]:
    """By the algorithm; NEXTN is the layer of a model with recurrent states."""
    folder = tmp_path_factory.mktemp("right")
    build_model("recall-hybrid", folder / "hybrid")
    by_hybrid = Right(str(folder / "hybrid"), {"speculative_algorithm": "NEXTN"}, 64, *recalled(40))
    beside = {kind: Right(WIDE_MODEL_PATH, by(kind, build(kind, folder / kind)), 16, PROMPTS, RIGHT) for kind in KINDS}
    return {**beside, "NEXTN": by_hybrid}


def by(kind: str, path: str, **flags: Any) -> dict[str, Any]:
    return {"speculative_algorithm": kind, "speculative_draft_model_path": path, **flags}


WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "chunked": {"page_size": 4},
    "mixed": {"enable_mixed_chunk": True},
    "overlapped": {"stream": "threaded", "stream_delay_s": 0.001},
    "retracted": {"test_retract": 4, "use": EngineUse(retracted_kv="host")},
    "recomputed": {"test_retract": 4},
    "without tapes": {"disable_cuda_graph": True},
}


@pytest.mark.parametrize(("kind", "way"), [*in_turn(KINDS, [*WAYS]), *in_turn(["NEXTN"], [*WAYS])])
def test_a_drafter_that_is_right_gives_all_that_a_step_can_hold(right: dict[str, Right], kind: str, way: str) -> None:
    """40 tokens behind the first: eight steps of four drafts, one of them without where the last page is full."""
    one = right[kind]
    chunked = {"chunked_prefill_size": one.chunk} if way in ("chunked", "mixed") else {}
    with EngineInProcess(one.path, **one.flags, **chunked, **WAYS[way]) as engine:
        always(engine.parts.scheduler)
        assert answers_to(engine, one.prompts, new=NEW) == one.answers
        how = fared(engine)
    assert how.accepted == how.drafts
    assert how.drafts == 4 * 32 or (way in ("retracted", "recomputed", "mixed", "overlapped") and how.drafts > 90)


@pytest.mark.parametrize(("tp_size", "kind"), in_turn([1, 2], ["NEXTN", "EAGLE"]))
def test_behind_rejected_drafts_the_next_ones_are_right(right: dict[str, Right], tp_size: int, kind: str) -> None:
    """Each second draft is made wrong on its way to the core, so a step accepts one, and the next begins behind rejected rows."""
    one = right[kind]
    with engine_of(one.path, tp_size=tp_size, num_threads=1, kv_units=2, **one.flags) as engine:
        always(engine.parts.scheduler)
        spoil_all_but_the_first(engine)
        assert answers_to(engine, one.prompts, new=NEW) == one.answers
        counters = engine.parts.scheduler.counters
    assert counters.accepted_drafts == 4 * 20  # 40 tokens behind the first, two a step at most
    assert kind == "NEXTN" or counters.verify_steps == 20, "prompts of one chunk decode together"


@pytest.mark.parametrize(
    ("kind", "flags", "new", "turns", "least"),
    [
        ("EAGLE", {"max_total_tokens": 400, "enable_hierarchical_cache": True}, 64, 3, 70),  # no eviction for a draft
        ("NEXTN", {}, 80, 2, 8 * 60),
    ],
)
def test_prefixes_bring_their_tails(
    right: dict[str, Right], kind: str, flags: dict[str, Any], new: int, turns: int, least: int
) -> None:
    """From the tree, and from the host. Answers pass the end of the prompt, whose first token behind the prefix needs the tail."""
    one = right[kind]
    with EngineInProcess(one.path, page_size=4, **flags, **one.flags) as engine:
        always(engine.parts.scheduler)
        for turn in range(turns):
            for i, prompt in enumerate(one.prompts):
                assert engine.answer(f"{turn}-{i}", prompt, max_new_tokens=new) == continuation(
                    prompt, new, ignore_eos=True
                )
        host = engine.parts.scheduler.memory.part(HostCache)
        assert (host is None) == (not flags) and (host is None or host.counted["hicache_loaded_pages"] > 0)
        cached = [engine.cached[f"{turns - 1}-{i}"] for i in range(4)]
        assert cached == [64] * 4 if kind == "NEXTN" else cached[3] > 0
        how = fared(engine)
    assert how.accepted == how.drafts > least


@pytest.mark.parametrize("kind", some(KINDS, tried=["EAGLE3"]))
def test_ranks_draft_the_same(right: dict[str, Right], kind: str) -> None:
    flags, one = {"tp_size": 2, "num_threads": 1, "chunked_prefill_size": 32}, right[kind]
    with ranks(one.path, **flags, **one.flags) as group:
        always(group.engine.parts.scheduler)
        assert answers_to(group.engine, one.prompts, new=NEW) == one.answers
        how = fared(group.engine)
    assert how.accepted == how.drafts > 100


@pytest.mark.parametrize("kind", some(KINDS, tried=["EAGLE"]))
def test_any_sampling_gives_the_tokens_of_plain_decoding(tmp_path: Path, kind: str) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3", dtype="bfloat16")
    said, how = answers(path, **by(kind, make_tiny_eagle(tmp_path / "eagle", kind, dtype="bfloat16")))
    assert said == answers(path)[0]
    assert how.passes > 0 and how.accepted < how.drafts


def test_kv_of_8_bits_and_measured_memory(right: dict[str, Right]) -> None:
    """Tails stay as they are; the largest steps, the drafter's among them, are measured before there are pages."""
    flags = {"kv_cache_dtype": "fp8_e4m3", "max_total_tokens": None, "mem_fraction_static": 0.01, "context_length": 512}
    one = right["EAGLE3"]
    with EngineInProcess(one.path, **flags, **one.flags) as engine:
        always(engine.parts.scheduler)
        assert answers_to(engine, one.prompts, new=NEW) == one.answers
        how = fared(engine)
    assert how.accepted == how.drafts == 4 * 32


def test_other_weights_come_with_the_drafter(right: dict[str, Right]) -> None:
    one = right["EAGLE"]
    with EngineInProcess(one.path, **one.flags) as engine:
        always(engine.parts.scheduler)
        weights = engine.parts.weights
        model = weights.read(WIDE_MODEL_PATH, when_done=lambda: None).result(60.0)
        weights.take(model, model_path=WIDE_MODEL_PATH, version="next")
        assert answers_to(engine, one.prompts[:1], new=NEW) == one.answers[:1]
        assert fared(engine).accepted == fared(engine).drafts == 32


# ---- Layers that predict the token after the next (MTP) draft: answers are those of plain
# decoding.

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "deepseek_v32", *HYBRIDS)
Path_ = tuple[str, Answers]


@pytest.fixture(scope="module", params=some(FAMILIES, tried=["deepseek_v3", "glm4_moe", HYBRIDS[0]]))
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path_:
    folder = tmp_path_factory.mktemp(request.param)
    path = make_tiny_checkpoint(folder, request.param, dtype="bfloat16", num_nextn_predict_layers=1)
    return path, answers(path)[0]


def test_answers_are_those_of_plain_decoding(plain: Path_) -> None:
    check_answers(*plain, algorithm="NEXTN")


@pytest.mark.parametrize("plain", FAMILIES[:1], indirect=True)
def test_eagle_is_another_name_of_it(plain: Path_) -> None:
    """SGLang calls both so."""
    check_answers(*plain, algorithm="EAGLE")


def check_answers(path: str, wanted: Answers, *, algorithm: str) -> None:
    chunk = 32 if load_model_config(path).recurrent is None else 64
    said, how = answers(path, speculative_algorithm=algorithm, chunked_prefill_size=chunk)
    assert said == wanted
    assert how.passes > 0 and how.drafts > how.accepted


@pytest.mark.skipif(linear_kernel() is None, reason="--reduce-units needs the C kernel")
def test_ranks_draft_as_one_does(tmp_path: Path) -> None:
    """The layer's heads and experts are divided: its drafts, right and wrong ones, are those of one rank."""
    path = make_tiny_checkpoint(tmp_path, "qwen3_next", dtype="bfloat16", mtp_num_hidden_layers=1)
    flags: dict[str, Any] = {"speculative_algorithm": "NEXTN", "reduce_units": 2, "num_threads": 1}
    wanted = answers(path, sure=True, **flags)
    with ranks(path, tp_size=2, **flags) as group:
        always(group.engine.parts.scheduler)
        assert (ask_all(group.engine, sure=True), fared(group.engine)) == wanted


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "m", "deepseek_v3")
    for algorithm in ("NEXTN", "EAGLE"):
        config = EngineConfig(model_path=path, speculative_algorithm=algorithm, max_total_tokens=1024)
        said = f"--speculative-algorithm {algorithm}: the model's config.json has no num_nextn_predict_layers or"
        with pytest.raises(ConfigError, match=said):
            build_engine(config, load_model_config(path))
