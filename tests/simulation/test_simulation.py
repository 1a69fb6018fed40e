"""The fixed seeds, the files of past failures, and the proof that a seed is a replay and that bugs would be seen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import scenario
from tests.simulation.__main__ import FIXED_SEEDS
from tests.simulation.mutants import MUTANTS, is_caught
from tests.simulation.options import FAULTS, options_of
from tests.simulation.run import Outcome, run

HASHED_SEEDS = (3, 7)
PLANTED = (
    "skip the quarantine",
    "acknowledge an abort while writes are in flight",
    "forget a metadata row",
)  # the others: make sim-mutants


def _must_hold(outcome: Outcome) -> None:
    assert outcome.ok, f"{outcome.problem}\n{outcome.details}"


@pytest.mark.parametrize("seed", FIXED_SEEDS)
def test_safe_under_faults_and_at_rest_after_them(seed: int) -> None:
    _must_hold(run(options_of(seed)))


def test_the_fixed_seeds_draw_every_kind_of_fault() -> None:
    assert {kind for seed in FIXED_SEEDS for kind in options_of(seed).faults} == set(FAULTS)


def test_without_faults_every_request_succeeds() -> None:
    outcome = run(options_of(5, nodes=8, faults=()))
    _must_hold(outcome)
    assert set(outcome.outcomes) == {"ok"} and not outcome.injected


def test_a_seed_is_a_replay_whatever_the_hash_seed() -> None:
    code = (
        "from tests.simulation.options import options_of; from tests.simulation.run import run\n"
        f"print([run(options_of(seed)).trace_hash for seed in {HASHED_SEEDS}])"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "4242")
    ]
    assert said[0] == said[1]
    assert said[0].strip() == str([run(options_of(seed)).trace_hash for seed in HASHED_SEEDS])


@pytest.mark.parametrize("path", scenario.all_paths(), ids=lambda path: path.stem)
def test_past_failures_stay_mended(path: Path) -> None:
    _must_hold(run(scenario.load(path).options))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(name: str, tmp_path: Path) -> None:
    mutant = next(m for m in MUTANTS if m.name == name)
    caught, said = is_caught(mutant, tmp_path)
    assert caught, said
