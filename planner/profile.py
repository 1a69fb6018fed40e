"""Files of measured profiles."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from planner.fit import HandoverTime, StepTimeFit, fit, fit_handover, read_pair, read_records
from planner.gpus import Gpu
from planner.step_time import Beside, Fitted
from service.flags import ConfigError


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured step times, the GPU, or both (docs/planning.md)."""

    step_time: Fitted | None = None
    outside_s: float | None = None
    source: str = ""
    handover: HandoverTime | None = None
    tp_size: int = 1
    gpu: Gpu | None = None
    compute_efficiency: float | None = None
    memory_efficiency: float | None = None
    step_overhead_ms: float | None = None
    all_reduce_us: float | None = None
    accept_rate: float | None = None
    match_rate: float | None = None
    beside: Beside = Beside()


def fit_profile(reports: Sequence[str], *, pair: str | None, tp_size: int) -> Profile:
    """Fit step times, and the hand-over to `pair`. Raises ConfigError."""
    found = fit([read_records(path) for path in reports])
    handover = fit_handover(*read_pair(pair)) if pair else None
    return Profile(
        step_time=found.step_time,
        outside_s=found.outside_s,
        source=describe(found, handover),
        handover=handover,
        tp_size=tp_size,
    )


def save_profile(profile: Profile, path: str) -> None:
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


def describe(found: StepTimeFit, handover: HandoverTime | None = None) -> str:
    pair = ""
    if handover is not None:
        pair = f"; hand-over {1000 * handover.request_s:.1f} ms and {1e6 * handover.token_s:.1f} us a token"
    return (
        f"measured: {found.num_prefills} prefills (median error {100 * found.prefill_error:.1f} %), "
        f"{found.num_gaps} decode steps ({100 * found.decode_error:.1f} %){pair}"
    )


def read_profile(path: str) -> Profile:
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"--gpu-profile {path}: cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--gpu-profile {path}: is no profile (--save-profile writes one): {error}") from None
    if found.step_time is None and found.gpu is None:
        raise ConfigError(f"--gpu-profile {path}: has neither `step_time` nor `gpu`")
    if min(found.beside.prefill, found.beside.decode) < 0:
        raise ConfigError(f"--gpu-profile {path}: beside: a step takes no less time while others run; give 0 or more")
    for name, rate in (("accept_rate", found.accept_rate), ("match_rate", found.match_rate)):
        if rate is not None and not (0 < rate < 1 or (rate == 1 and name == "match_rate")):
            raise ConfigError(f"--gpu-profile {path}: {name} must be between 0 and 1, got {rate}")
    return found
