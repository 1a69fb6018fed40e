"""Which batch sizes of decode are recorded as graphs. Pure."""

from collections.abc import Sequence

MOST_BY_DEFAULT = 256


def graph_sizes(*, sizes: Sequence[int], max_bs: int | None, max_running: int) -> list[int]:
    """Choose the sizes, ascending: `sizes` if given, else 1, 2, 4, then steps that waste at most 7 rows up to 64, 31 beyond.

    None is larger than the first that holds `max_running` requests. `max_bs`: the largest by default.
    """
    if sizes:
        wanted = sorted(set(sizes))
    else:
        most = min(max_bs or MOST_BY_DEFAULT, max_running)
        wanted = [1, 2, 4, *range(8, 65, 8), *range(96, most + 1, 32)]
        wanted = [size for size in wanted if size < most] + [most]
    needed = [size for size in wanted if size < max_running]
    return needed + [size for size in wanted if size >= max_running][:1]
