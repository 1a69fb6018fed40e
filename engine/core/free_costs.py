"""Costs that make every draft pay, for --no-speculative-adaptive. Pure."""


class FreeRows:
    """`RowCosts` without a unit: more rows cost less."""

    def step(self, rows: int) -> float:
        return 1 / rows

    def note(self, rows: int, taken_s: float) -> None:
        """Learn nothing."""


class FreePasses(FreeRows):
    """The same for drafter passes."""

    def step(self, rows: int) -> float:
        return 0.0
