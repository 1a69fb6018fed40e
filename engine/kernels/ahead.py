"""Parallel build of all kernels before a first start: python -m engine.kernels.ahead"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.kernels.build import CSRC, TEAM, load_library
from engine.kernels.rows import SAMPLE
from service.waiter import usable_cores

FLAGS = {source.path.name: source.flags for source in (SAMPLE, TEAM)}


def build_all(folder: Path = CSRC) -> list[str]:
    """Return kernels that failed to build."""
    largest_first = sorted(folder.glob("*.c"), key=lambda source: -source.stat().st_size)
    with ThreadPoolExecutor(usable_cores()) as pool:
        built = pool.map(_is_built, largest_first)
        return [source.name for source, there in zip(largest_first, built, strict=True) if not there]


def _is_built(source: Path) -> bool:
    return load_library(source, flags=FLAGS.get(source.name, ())) is not None


if __name__ == "__main__":
    build_all()
