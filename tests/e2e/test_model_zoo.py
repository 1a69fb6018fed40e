"""Every family in every way: what docs/models.md says."""

from pathlib import Path

import pytest

from tests.e2e.zoo import PAGE, outcomes_of, rows_in
from tests.models.tiny_checkpoints import ARCHITECTURES


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_the_table_says_what_works(family: str, tmp_path: Path) -> None:
    said, found = dict(rows_in(PAGE.read_text()))[ARCHITECTURES[family]], outcomes_of(family, tmp_path)
    assert found == {way: said[way] for way in found}, "make model-table"


def test_the_table_has_each_family_once() -> None:
    assert sorted(name for name, _ in rows_in(PAGE.read_text())) == sorted(ARCHITECTURES.values())
