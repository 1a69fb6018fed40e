"""Every family in every way: what docs/models.md says. `make test` tries every way with each kind of layer, and what is a family's own."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.models.zoo import PAGE, WAYS, outcomes_of, rows_in
from tests.engine.kinds import OF_EACH_KIND
from tests.models.tiny_checkpoints import ARCHITECTURES

OWN = ("TP 2", "LoRA")  # how its weights are divided and adapted
IN_TURN = [way for way in WAYS if way not in OWN]  # by the kind of its layers and of its cache
OTHERS = sorted(set(ARCHITECTURES) - OF_EACH_KIND)


def few_ways(family: str) -> Sequence[str]:
    """Of a family that stands for no kind its own ways, and one of the others."""
    return [*OWN, IN_TURN[OTHERS.index(family) % len(IN_TURN)]] if family in OTHERS else list(WAYS)


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_the_table_says_what_works(family: str, tmp_path: Path) -> None:
    check(family, few_ways(family), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_the_table_says_what_works_in_the_other_ways(family: str, tmp_path: Path) -> None:
    check(family, [way for way in WAYS if way not in few_ways(family)], tmp_path)


def check(family: str, ways: Sequence[str], folder: Path) -> None:
    said, found = dict(rows_in(PAGE.read_text()))[ARCHITECTURES[family]], outcomes_of(family, folder, ways)
    assert found == {way: said[way] for way in found}, "make model-table"


def test_the_table_has_each_family_once() -> None:
    assert sorted(name for name, _ in rows_in(PAGE.read_text())) == sorted(ARCHITECTURES.values())
