"""Layouts of clusters: xPyD, unified, or both. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from service.flags import ConfigError

MOST_WORKERS, MOST_GPUS = 999, 32  # per pool; per worker


@dataclass(frozen=True, slots=True, order=True)
class ClusterLayout:
    """Numbers of workers with `tp` GPUs. `mixed`: unified workers mix decodes into prefill
    steps.
    """

    prefill: int = 0
    decode: int = 0
    unified: int = 0
    mixed: bool = False
    tp: int = 1

    @property
    def name(self) -> str:
        pools = (f"{self.prefill}P{self.decode}D" if self.prefill else "") + (
            f"{self.unified}U" if self.unified else ""
        )
        return pools + ("-mixed" if self.mixed else "") + (f"-tp{self.tp}" if self.tp > 1 else "")

    @property
    def is_mixed_pool(self) -> bool:
        return bool(self.prefill and self.unified)

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.unified

    @property
    def num_gpus(self) -> int:
        return self.num_workers * self.tp

    @property
    def roles(self) -> list[str]:
        return ["prefill"] * self.prefill + ["decode"] * self.decode + ["unified"] * self.unified


def parse_layout(text: str) -> ClusterLayout:
    """Parse "2P3D", "4U", "4U-mixed", "2P1D1U", perhaps with "-tp2"."""
    found = re.fullmatch(r"(?:(\d+)P(\d+)D)?(?:(\d+)U(-mixed)?)?(?:-tp(\d+))?", text, re.IGNORECASE)
    if found is None:
        raise _unknown(text)
    prefill, decode, unified, mixed, tp = found.groups()
    pools = [int(size) for size in (prefill, decode, unified) if size is not None]
    if not pools or not all(1 <= size <= MOST_WORKERS for size in pools) or not 1 <= int(tp or 1) <= MOST_GPUS:
        raise _unknown(text)
    return ClusterLayout(
        prefill=int(prefill or 0),
        decode=int(decode or 0),
        unified=int(unified or 0),
        mixed=mixed is not None,
        tp=int(tp or 1),
    )


def _unknown(text: str) -> ConfigError:
    return ConfigError(
        f"--layouts {text}: write 2P3D (prefill and decode workers), 4U (unified ones), 4U-mixed, or 2P1D1U (a mixed pool); "
        "2P3D-tp2: of two GPUs each"
    )


def candidates(num_workers: int, *, tps: Sequence[int] = (1,)) -> list[ClusterLayout]:
    """Return all layouts with equally many GPUs, as larger pools queue better."""
    gpus = num_workers * max(tps)
    return [layout for tp in tps if gpus % tp == 0 for layout in _of_size(gpus // tp, tp)]


def _of_size(workers: int, tp: int) -> list[ClusterLayout]:
    split = [ClusterLayout(prefill=p, decode=workers - p, tp=tp) for p in range(1, workers)]
    return [ClusterLayout(unified=workers, tp=tp), ClusterLayout(unified=workers, mixed=True, tp=tp), *split]
