"""Check that all ranks have the same C kernels, since other arithmetic rounds differently."""

from collections.abc import Callable, Mapping, Sequence

from engine.kernels.allreduce import allreduce
from engine.kernels.linear import linear_kernel
from engine.kernels.tape import tape_library
from service.flags import ConfigError

_KERNELS: Mapping[str, Callable[[], object]] = {
    "linear.c": linear_kernel,
    "allreduce.c": allreduce,
    "team.c": tape_library,
}


def kernels_here() -> list[str]:
    return [name for name, find in _KERNELS.items() if find() is not None]


def check_same_kernels(own: Sequence[str], of_followers: Mapping[int, Sequence[str]]) -> None:
    """Raises ConfigError with the first different rank."""
    for rank, theirs in sorted(of_followers.items()):
        if list(theirs) != list(own):
            raise ConfigError(
                f"rank {rank} has {_said(theirs)}, the leader {_said(own)}, so their steps would differ; see in the log of that "
                "rank what is missing, or set TANDEM_NO_C_KERNELS=1 for all"
            )


def _said(names: Sequence[str]) -> str:
    return f"the C kernels {', '.join(names)}" if names else "no C kernels"
