"""Steps of a drafter, and steps that verify its drafts, planned before the host has what they read: with the tokens of plain decoding.

What they read lies on the device: the newest token that counts and how many drafts do, then drafts. A drafter that is right accepts as many
as without overlap, so each step begins where the one before ended, whatever was rejected.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.plan import Plan, PlanItem
from engine.device.step_memory import EngineUse
from engine.model_files.model_config import WIDE_MODEL_PATH
from engine.parallel.collectives import SINGLE_RANK
from engine.speculative.draft_rows import VerifiedRows, judged, verified_rows
from engine.speculative.draft_steps import DraftPaths, Passes, PassRows
from engine.speculative.drafts import placeholder
from engine.speculative.futures import NO_DRAFT, DraftedInputs, DraftFutures
from tests.cells import in_turn
from tests.engine.drafts.drafters import always, answers_to, fared
from tests.engine.drafts.test_eagle import NEW, PROMPTS, RIGHT, by, recalled
from tests.engine.engine_in_process import EngineInProcess
from tests.engine.ranks.ranks_in_process import engine_of
from tests.models.recall_drafters import build
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tools.recall.build import build as build_model

OVERLAPPED: dict[str, Any] = {"stream": "threaded", "stream_delay_s": 0.001}
KINDS = ("EAGLE", "EAGLE3", "STANDALONE", "NEXTN")


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, Any]]]:
    """Model and flags by algorithm; NEXTN is the layer of a model with recurrent states."""
    folder = tmp_path_factory.mktemp("right")
    build_model("recall-hybrid", folder / "hybrid")
    beside = {kind: (WIDE_MODEL_PATH, by(kind, build(kind, folder / kind))) for kind in KINDS[:2]}
    own = {"STANDALONE": (WIDE_MODEL_PATH, by("STANDALONE", WIDE_MODEL_PATH))}
    return {**beside, **own, "NEXTN": (str(folder / "hybrid"), {"speculative_algorithm": "NEXTN"})}


def asked_of(kind: str) -> tuple[list[list[int]], list[list[int]]]:
    return recalled(40) if kind == "NEXTN" else (PROMPTS, RIGHT)


@contextmanager
def noted(path: str, **flags: Any) -> Iterator[tuple[EngineInProcess, list[Plan]]]:
    """An engine with a drafter that always drafts, and the plans of its steps."""
    with engine_of(path, **{"tp_size": 1, **OVERLAPPED, **flags}) as engine:
        always(engine.parts.scheduler)
        yield engine, plans_of(engine)


def plans_of(engine: EngineInProcess) -> list[Plan]:
    """The plans of its steps from now on."""
    plans, schedule = list[Plan](), engine.parts.scheduler.schedule

    def schedule_and_note(*args: Any, **given: Any) -> Plan | None:
        plan = schedule(*args, **given)
        plans.extend([] if plan is None else [plan])
        return plan

    engine.parts.scheduler.schedule = schedule_and_note
    return plans


def unseen(plans: list[Plan]) -> int:
    """Steps that verify drafts which the host has not seen."""
    return sum(any(item.draft and item.tokens[0] < 0 for item in plan.items) for plan in plans)


def ahead(plans: list[Plan]) -> int:
    """Steps of the drafter behind drafts that are not judged."""
    return sum(any(item.unverified for item in plan.items) for plan in plans)


@pytest.mark.parametrize(("kind", "tp_size"), in_turn(KINDS, [1, 2]))
def test_no_step_waits_for_the_one_before(right: dict[str, Any], kind: str, tp_size: int) -> None:
    (path, flags), (prompts, answers) = right[kind], asked_of(kind)
    with noted(path, tp_size=tp_size, num_threads=1, **flags) as (engine, plans):
        assert answers_to(engine, prompts, new=NEW) == answers
        how, counters = fared(engine), engine.parts.scheduler.counters
    assert how.accepted == how.drafts >= 4 * 30
    assert unseen(plans) >= counters.verify_steps - 1 and ahead(plans) >= counters.draft_steps - 2 > 0
    assert engine.seen.overlapped >= len(plans) - 3


@pytest.fixture
def each_third_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is right guesses wrong at every third position, on all ranks."""
    original = Passes._guesses

    def spoiled(passes: Passes, drafter: Any, out: Tensor, paths: DraftPaths, rows: PassRows, lengths: Any) -> Any:
        tokens, confidences = original(passes, drafter, out, paths, rows, lengths)
        return tokens + ((paths.starts + rows.number) % 3 == 0)[:, None, None], confidences

    monkeypatch.setattr(Passes, "_guesses", spoiled)


WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "small pages": {"page_size": 4},
    "two ranks": {"tp_size": 2, "num_threads": 1, "kv_units": 2},
    "retracted": {"test_retract": 4, "use": EngineUse(retracted_kv="host")},
    "recomputed": {"test_retract": 4},
    "mixed": {"enable_mixed_chunk": True, "chunked_prefill_size": 64},
}


@pytest.mark.usefixtures("each_third_is_wrong")
@pytest.mark.parametrize(("kind", "way"), in_turn(KINDS, [*WAYS]))
def test_a_step_begins_behind_what_counts(right: dict[str, Any], kind: str, way: str) -> None:
    """Two drafts count, the third is wrong, and the model's own token takes its place: three tokens a step."""
    (path, flags), (prompts, answers) = right[kind], asked_of(kind)
    with noted(path, **{**flags, **WAYS[way]}) as (engine, plans):
        assert answers_to(engine, prompts, new=NEW) == answers
        counters = engine.parts.scheduler.counters
    assert unseen(plans) > 0 and ahead(plans) > 0
    assert counters.accepted_drafts > (0.4 if way in ("retracted", "recomputed") else 0.6) * 4 * (NEW - 1)
    assert 0 < counters.wrong_drafts <= counters.drafts - counters.accepted_drafts


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "top_k": 3},
    "min_p": {"temperature": 1.0, "min_p": 0.3, "top_p": 0.8},
    "bias": {"temperature": 1.0, "logit_bias": {30: 40.0, 31: 40.0}},
    "end": {"temperature": 1.0, "top_k": 3, "min_new_tokens": 20, "ignore_eos": False},
    "stop": {"temperature": 1.0, "logit_bias": {30: 40.0, 31: 40.0}, "stop_token_ids": (30,), "min_new_tokens": 30},
    "short": {"max_new_tokens": 2},
}
FAMILIES = ("qwen3", "gemma2", "deepseek_v3", "mixtral")


def ask(engine: EngineInProcess, **more: dict[str, Any]) -> dict[str, list[int]]:
    prompt = [20 + i * i % 11 for i in range(50)]
    for i, (name, sampling) in enumerate({**SAMPLED, **more}.items()):
        engine.add(name, prompt[i:], **{"seed": i, "max_new_tokens": 40, **sampling})
    engine.run()
    return engine.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_any_sampling_gives_the_tokens_of_plain_decoding(tmp_path: Path, family: str) -> None:
    """Windows, latents and experts; a drafter of another kind, mostly wrong, and the model itself (float32: no CPU's order of sums swaps tokens)."""
    path = make_tiny_checkpoint(tmp_path / "model", family, dtype="float32")
    other = make_tiny_checkpoint(tmp_path / "other", "llama", seed=1, num_hidden_layers=2, dtype="float32")
    with EngineInProcess(path) as plain:
        wanted = ask(plain)
    for drafter in (other, path):
        with noted(path, **by("STANDALONE", drafter)) as (engine, plans):
            assert ask(engine) == wanted
            how = fared(engine)
        assert unseen(plans) > 0 and ahead(plans) > 0 and 0 < how.accepted <= how.drafts
        assert (how.accepted < how.drafts) == (drafter == other)


def test_a_request_that_needs_the_host_makes_its_batch_wait(tmp_path: Path) -> None:
    """Counts of tokens in flight are no penalty's: the batch overlaps once such a request has ended."""
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3", dtype="bfloat16")
    penalized = {"temperature": 0.7, "repetition_penalty": 1.05, "max_new_tokens": 20}
    with EngineInProcess(path) as plain:
        wanted = ask(plain, penalized=penalized)
    with noted(path, **by("STANDALONE", path)) as (engine, plans):
        found = ask(engine, penalized=penalized)
    assert found == wanted
    waits = [plan for plan in plans if any(item.rid == "penalized" for item in plan.items)]
    assert ahead(waits) == 0 and ahead(plans) > 0


def test_requests_that_end_early_leave_nothing(right: dict[str, Any]) -> None:
    """Aborted in each of the first turns, with a step of the drafter and one behind it in flight."""
    path, flags = right["EAGLE"]
    with noted(path, **flags) as (engine, plans):
        for turns in range(2, 12):
            for i, prompt in enumerate(PROMPTS):
                engine.add(f"{turns}-{i}", prompt, max_new_tokens=NEW)
            for _ in range(turns):
                engine.turn()
            engine.hear(engine.parts.scheduler.abort(f"{turns}-0"))
            engine.run()
            assert [engine.tokens[f"{turns}-{i}"] for i in range(1, 4)] == RIGHT[1:]
        how = fared(engine)
    assert unseen(plans) > 20 and how.accepted <= how.drafts


# ---- What lies on the device.


def verified(futures: DraftFutures, drafts: list[int], tokens: list[int], *, slot: int = 1, start: int = 5) -> None:
    """Keep what a step leaves that verifies `drafts` behind a known token, and samples `tokens`."""
    items = [
        PlanItem("r", slot, [token], start + i, 0, [], True, i, False, behind=int(i > 0))
        for i, token in enumerate([7, *drafts])
    ]
    rows = VerifiedRows(*torch.tensor(verified_rows(items, page_size=16)).T)
    rows = rows._replace(guesses=futures.read(rows.guesses))
    futures.keep_verified(rows, judged(rows, torch.tensor(tokens), deepest=len(drafts), collectives=SINGLE_RANK))


def futures_of_three() -> DraftFutures:
    return DraftFutures(num_slots=3, most=2, device=torch.device("cpu"))


@pytest.mark.parametrize(("tokens", "newest", "accepted"), [([4, 9, 9], 9, 1), ([4, 6, 8], 8, 2), ([3, 6, 8], 3, 0)])
def test_the_newest_token_that_counts_and_its_place(tokens: list[int], newest: int, accepted: int) -> None:
    """Drafts 4 and 6 behind position 5."""
    futures = futures_of_three()
    slots = torch.tensor([0, 1, 2])
    futures.keep_drafts(1, slots, torch.tensor([1, 4, 2]))
    futures.keep_drafts(2, slots, torch.tensor([1, 6, 2]))
    verified(futures, [placeholder(1, number) for number in (1, 2)], tokens)
    assert futures.read(torch.tensor([placeholder(1, 0)])).tolist() == [newest]
    at = torch.tensor([1])
    assert [int(futures.accepted(at, torch.tensor([6]), torch.tensor([most]))) for most in (2, 1, 0)] == [
        accepted,
        min(accepted, 1),
        0,
    ]


def test_a_draft_that_was_not_made_counts_never_and_is_a_token_as_input() -> None:
    futures = futures_of_three()
    futures.keep_drafts(1, torch.tensor([1]), torch.tensor([4]))
    futures.forget_drafts(torch.tensor([1]))
    ids = torch.tensor([placeholder(1, 1), 5, -2])
    assert futures.read(ids).tolist() == [NO_DRAFT, 5, -2]

    class Inner:
        """Placeholders of the future map are its own."""

        def resolve(self, token_ids: Tensor) -> Tensor:
            return token_ids

        recorded = resolve

        def fill(self, rows: int) -> None: ...

    inputs = DraftedInputs(Inner(), futures)
    assert inputs.resolve(ids).tolist() == inputs.recorded(ids).tolist() == [0, 5, -2]
    verified(futures, [placeholder(1, 1)], [0, 1])
    assert futures.read(torch.tensor([placeholder(1, 0)])).tolist() == [0]
    assert int(futures.accepted(torch.tensor([1]), torch.tensor([6]), torch.tensor([2]))) == 0
