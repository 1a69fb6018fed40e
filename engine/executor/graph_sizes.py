"""Which batch sizes of decode are recorded as graphs. Pure."""

from collections.abc import Sequence

MOST_BY_DEFAULT = 256


def graph_sizes(*, asked: Sequence[int], max_bs: int | None, max_running: int) -> list[int]:
    """Ascending. `asked`: these and no others; else 1, 2, 4, then what wastes at most 7 rows up to 64 and 31 beyond.

    No size beyond the first that holds `max_running`, the most requests that run at once. `max_bs`: the largest.
    """
    if asked:
        wanted = sorted(set(asked))
    else:
        most = min(max_bs or MOST_BY_DEFAULT, max_running)
        wanted = [1, 2, 4, *range(8, 65, 8), *range(96, most + 1, 32)]
        wanted = [size for size in wanted if size < most] + [most]
    needed = [size for size in wanted if size < max_running]
    return needed + [size for size in wanted if size >= max_running][:1]
