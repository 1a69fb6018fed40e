"""Names the clusters that are compared, all on the same cores: which processes, on which of the cores. Pure.

    unified          | one worker, a thread on each core: prompts first, or with mixed chunks (the default on a CPU), whose size may be tuned;
                     | or multiplexed: prompts and decodes at the same time (--enable-pdmux), with the load's objective for ITL
    pair             | prefill on one half of the cores, decode on the other; or both on all of them, as `tandem up` starts them
    mixed pool       | a pair, each of whose workers may serve a request alone, both on all cores

The router and the load's client go where a core rests, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from planner.goodput import SloTargets
from service.flags import ConfigError

ROLES = ("prefill", "decode", "unified")
KINDS = ("unified", "pairs", "mixed pool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`flags`: of `tandem up`. `tuned`: steps with prompts are as short as the load's objective for ITL.

    `shared`: workers have no cores of their own.
    """

    name: str
    kind: str
    flags: tuple[str, ...]
    tuned: bool = False
    shared: bool = False
    multiplexed: bool = False

    @property
    def is_unified(self) -> bool:
        return self.kind == "unified"


LAYOUTS = msgspec.toml.decode(
    Path(__file__).with_name("layouts.toml").read_bytes(), type=dict[str, tuple[Layout, ...]]
)["layouts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinning:
    """`cores`: of the whole cluster and its client. `by_role`: a worker's. `threads`: that a worker computes with."""

    cores: tuple[int, ...]
    by_role: Mapping[str, tuple[int, ...]]
    threads: int


def pinning(layout: Layout, cores: Sequence[int]) -> Pinning:
    """Divide an even number of `cores` (the last one rests where there is one too many)."""
    half = len(cores) // 2
    if not half:
        raise ConfigError(f"a pair needs two cores, this process has {len(cores)}: allow it more (taskset -c)")
    used = tuple(sorted(cores)[: 2 * half])
    if layout.is_unified or layout.shared:
        return Pinning(cores=used, by_role=dict.fromkeys(ROLES, used), threads=2 * half)
    return Pinning(cores=used, by_role={"prefill": used[:half], "decode": used[half:]}, threads=half)


def flags_of(layout: Layout, slo: SloTargets, *, threads: int, chunk: int) -> tuple[str, ...]:
    """Return the flags of `tandem up`. `chunk`: most prompt tokens of a step, where it is tuned."""
    flags = (*layout.flags, "--num-threads", str(threads))
    if layout.multiplexed:
        assert slo.itl_s is not None
        return (*flags, "--pdmux-itl", f"{slo.itl_s:g}")
    return (*flags, "--chunked-prefill-size", str(chunk)) if layout.tuned else flags
