"""Costs by which every draft pays, however long its steps take: for --no-speculative-adaptive. Pure."""


class FreeRows:
    """As `RowCosts`, without a unit: a step takes less the more rows it has."""

    def step(self, rows: int) -> float:
        return 1 / rows

    def note(self, rows: int, taken_s: float) -> None:
        """Learn nothing."""


class FreePasses(FreeRows):
    """`FreeRows` for passes of the executor's drafter."""

    def step(self, rows: int) -> float:
        return 0.0
