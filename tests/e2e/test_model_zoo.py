"""Every family in every way: what docs/models.md says."""

from pathlib import Path

import pytest

from tests.e2e.zoo import PAGE, row_of, rows_in
from tests.models.tiny_checkpoints import ARCHITECTURES


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_the_table_says_what_works(family: str, tmp_path: Path) -> None:
    assert row_of(family, tmp_path) in rows_in(PAGE.read_text()), "make model-table"


def test_the_table_has_each_family_once() -> None:
    rows = rows_in(PAGE.read_text())
    assert len(rows) == len(set(rows)) == len(ARCHITECTURES)
