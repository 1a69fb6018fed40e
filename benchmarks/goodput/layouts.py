"""The clusters that are compared, all on the same cores: which processes, on which of the cores, and what `tandem plan` calls them. Pure.

    unified          | one worker, a thread on each core: prompts first, or with mixed chunks (the default on a CPU), whose size may be tuned
    pair             | prefill on one half of the cores, decode on the other
    mixed pool       | the same, and a unified worker, with as many threads as one of them, that goes where a core rests

The router and the load's client go where a core rests, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.goodput import SloTargets
from service.flags import ConfigError

KINDS = ("unified", "pairs", "mixed pool")
LAYERWISE = "--disaggregation-layerwise-transfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`planned`: its name in `tandem plan`. `flags`: of `tandem up`. `layerwise`: pages leave layer by layer. `tuned`: steps with prompts

    are as short as the load's objective for ITL.
    """

    name: str
    kind: str
    planned: str
    flags: tuple[str, ...]
    layerwise: bool = False
    tuned: bool = False

    @property
    def is_unified(self) -> bool:
        return self.kind == "unified"


LAYOUTS = (
    Layout(name="unified", kind="unified", planned="1U", flags=("--unified", "--no-enable-mixed-chunk")),
    Layout(name="mixed chunk", kind="unified", planned="1U-mixed", flags=("--unified",)),
    Layout(name="mixed chunk, tuned", kind="unified", planned="1U-mixed", flags=("--unified",), tuned=True),
    Layout(name="pair", kind="pairs", planned="1P1D", flags=(LAYERWISE, "off")),
    Layout(name="pair, by layers", kind="pairs", planned="1P1D", flags=(LAYERWISE, "on"), layerwise=True),
    Layout(name="mixed pool", kind="mixed pool", planned="1P1D1U-mixed", flags=(LAYERWISE, "off", "--mixed", "1")),
)


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
    if layout.is_unified:
        return Pinning(cores=used, by_role={"unified": used}, threads=2 * half)
    by_role = {"prefill": used[:half], "decode": used[half:], "unified": used}
    return Pinning(cores=used, by_role=by_role, threads=half)


def flags_of(layout: Layout, slo: SloTargets, *, threads: int, chunk: int) -> tuple[str, ...]:
    """Return the flags of `tandem up`. `chunk`: most prompt tokens of a step, where it is tuned."""
    flags = (*layout.flags, "--num-threads", str(threads))
    if layout.kind == "mixed pool":
        assert slo.itl_s is not None
        return (*flags, "--mixed-ttft", f"{slo.ttft_s:g}", "--mixed-itl", f"{slo.itl_s:g}")
    return (*flags, "--chunked-prefill-size", str(chunk)) if layout.tuned else flags
