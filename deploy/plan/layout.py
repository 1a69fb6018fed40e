"""Which clusters are compared: xPyD, and workers that do both. Pure."""

import re
from dataclasses import dataclass

from engine.config import ConfigError


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """`prefill` and `decode` workers, or `unified` ones. `mixed`: their decodes ride along in prefill steps."""

    prefill: int = 0
    decode: int = 0
    unified: int = 0
    mixed: bool = False

    @property
    def name(self) -> str:
        if self.unified:
            return f"{self.unified}U" + ("-mixed" if self.mixed else "")
        return f"{self.prefill}P{self.decode}D"

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.unified

    @property
    def roles(self) -> list[str]:
        return ["prefill"] * self.prefill + ["decode"] * self.decode + ["unified"] * self.unified


def parse_layout(text: str) -> Layout:
    """ "2P3D", "4U" or "4U-mixed"."""
    if pair := re.fullmatch(r"([1-9]\d{0,2})P([1-9]\d{0,2})D", text, re.IGNORECASE):
        return Layout(prefill=int(pair[1]), decode=int(pair[2]))
    if alone := re.fullmatch(r"([1-9]\d{0,2})U(-mixed)?", text, re.IGNORECASE):
        return Layout(unified=int(alone[1]), mixed=alone[2] is not None)
    raise ConfigError(f"--layouts {text}: write 2P3D (prefill and decode workers), 4U (unified ones) or 4U-mixed")


def candidates(num_workers: int) -> list[Layout]:
    """All of one size, so that their goodput per worker can be compared: larger pools queue better than small ones."""
    split = [Layout(prefill=p, decode=num_workers - p) for p in range(1, num_workers)]
    return [Layout(unified=num_workers), Layout(unified=num_workers, mixed=True), *split]
