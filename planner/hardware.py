"""What each worker runs on: step times, memory and network, from flags, the table of GPUs or measurements.

Owns the profile file: JSON of `Profile`. Pure but for reading and writing it.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from planner.config import PlanConfig
from planner.fit import HandoverTime, StepTimeFit, fit, fit_handover, read_pair, read_records
from planner.gpus import GPUS, Gpu
from planner.shape import Shape
from planner.step_time import Efficiency, Fitted, Roofline, StepTime
from service.flags import ConfigError

# Assumed where neither a flag nor a profile says better.
OUTSIDE_S = 0.005
LATENCY_S = 0.0005
COMPUTE, MEMORY, STEP_S, REDUCE_S = 0.55, 0.75, 0.002, 0.00001
MESSAGES = 4  # of a hand-over, one after another: handshake and answer, decode's pages, success
GB = 10**9


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured of one machine: step times of one model on it, or the GPU itself, or both (docs/planning.md).

    `source`: where it comes from, for people. `handover`, `compute_efficiency` and so on: None: not measured. `tp_size`: GPUs
    of the worker whose step times these are.
    """

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


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """`step_times`: by GPUs a worker. `memory_bytes`, `link_bytes_per_s`: of one GPU; memory None where --max-total-tokens says

    it all. `gpu_flag`: what chose the GPU. `assumed`: what nobody measured, for people.
    """

    step_times: dict[int, StepTime]
    memory_bytes: int | None
    link_bytes_per_s: float
    latency_s: float
    outside_s: float
    gpu_flag: str
    text: str
    assumed: str


def hardware_of(config: PlanConfig, shape: Shape, *, tps: Sequence[int], profile: Profile | None) -> Hardware:
    """Raises `ConfigError` for what is missing or cannot be."""
    profile = profile or Profile()
    gpu = GPUS[config.gpu] if config.gpu else profile.gpu
    memory_gb = config.gpu_memory_gb or (gpu.memory_gb if gpu else None)
    link_bytes_per_s = _link_bytes_per_s(config, gpu, profile.handover, shape)
    if memory_gb is None and config.max_total_tokens is None:
        raise ConfigError("--gpu-memory-gb: step times say nothing of memory; give this, --max-total-tokens or --gpu")
    if link_bytes_per_s is None and profile.handover is not None:
        raise ConfigError("--transfer-gb-s: the measured hand-over does not grow with the prompt; give this or --gpu")
    if link_bytes_per_s is None:
        raise ConfigError("--transfer-gb-s: step times say nothing of the network; give this, --fit-pair or --gpu")
    step_times: dict[int, StepTime]
    assumed: list[str]
    if profile.step_time is not None:
        if list(tps) != [profile.tp_size]:
            raise ConfigError(
                f"--tp-size: the step times were measured on {profile.tp_size} GPUs a worker; plan with as many"
            )
        step_times, assumed = {profile.tp_size: profile.step_time}, []
        text = profile.source or "measured step times"
    else:
        assert gpu is not None, "checked"
        efficiency, assumed = _efficiency(config, profile, tps)
        step_times = {tp: Roofline(gpu=gpu, shape=shape, efficiency=efficiency, tp=tp) for tp in tps}
        text = f"{gpu.name}, by its data sheet"
    if config.transfer_gb_s is None and profile.handover is None:
        assumed.append(f"transfers at {link_bytes_per_s / GB:g} GB/s a GPU")
    outside_s = _known(config.request_overhead_s, profile.outside_s)
    if outside_s is None:
        assumed.append(f"{1e3 * OUTSIDE_S:g} ms a request outside the engine")
    return Hardware(
        step_times=step_times,
        memory_bytes=None if memory_gb is None else int(memory_gb * GB),
        link_bytes_per_s=link_bytes_per_s,
        latency_s=_latency_s(config, profile.handover),
        outside_s=OUTSIDE_S if outside_s is None else outside_s,
        gpu_flag=_gpu_flag(config),
        text=text,
        assumed=", ".join(assumed),
    )


def profile_of(config: PlanConfig) -> Profile | None:
    """Read or measured, and saved where --save-profile says; None: a data sheet is all there is."""
    if config.gpu_profile is not None:
        return _read_profile(config.gpu_profile)
    if not config.fit:
        return None
    if len(config.tp_size) > 1:
        raise ConfigError("--tp-size: --fit measures one kind of worker; say how many GPUs that had")
    found = fit([read_records(path) for path in config.fit])
    handover = fit_handover(*read_pair(config.fit_pair)) if config.fit_pair else None
    profile = Profile(
        step_time=found.step_time,
        outside_s=found.outside_s,
        source=describe(found, handover),
        handover=handover,
        tp_size=config.tp_size[0] if config.tp_size else 1,
    )
    if config.save_profile:
        Path(config.save_profile).write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    return profile


def _efficiency(config: PlanConfig, profile: Profile, tps: Sequence[int]) -> tuple[Efficiency, list[str]]:
    """And what of it is assumed. A flag counts before the profile, both before what we think."""
    profile_step_s = None if profile.step_overhead_ms is None else profile.step_overhead_ms / 1e3
    profile_reduce_s = None if profile.all_reduce_us is None else profile.all_reduce_us / 1e6
    compute = _known(config.compute_efficiency, profile.compute_efficiency)
    memory = _known(config.memory_efficiency, profile.memory_efficiency)
    step_s = _known(config.step_overhead_s, profile_step_s)
    reduce_s = _known(config.all_reduce_overhead_s, profile_reduce_s)
    assumed = []
    if compute is None:
        assumed.append(f"{100 * COMPUTE:.0f} % of its FLOP/s")
    if memory is None:
        assumed.append(f"{100 * MEMORY:.0f} % of its bandwidths")
    if step_s is None:
        assumed.append(f"{1e3 * STEP_S:g} ms a step besides")
    if reduce_s is None and max(tps) > 1:
        assumed.append(f"{1e6 * REDUCE_S:g} us an all-reduce besides")
    efficiency = Efficiency(
        compute=COMPUTE if compute is None else compute,
        memory=MEMORY if memory is None else memory,
        step_s=STEP_S if step_s is None else step_s,
        reduce_s=REDUCE_S if reduce_s is None else reduce_s,
    )
    return efficiency, assumed


def _known(flag: float | None, measured: float | None) -> float | None:
    """A flag counts before what was measured."""
    return measured if flag is None else flag


def _gpu_flag(config: PlanConfig) -> str:
    if config.gpu_memory_gb is not None:
        return "--gpu-memory-gb"
    return f"--gpu {config.gpu}" if config.gpu else "--gpu-profile"


def _link_bytes_per_s(config: PlanConfig, gpu: Gpu | None, handover: HandoverTime | None, shape: Shape) -> float | None:
    if config.transfer_gb_s is not None:
        return config.transfer_gb_s * GB
    if handover is not None and handover.token_s > 0:
        return shape.kv_bytes / handover.token_s
    return gpu.link_gb_s * GB if gpu else None


def _latency_s(config: PlanConfig, handover: HandoverTime | None) -> float:
    """What a measured hand-over takes besides bytes and messages."""
    if config.transfer_latency_s is not None:
        return config.transfer_latency_s
    if handover is None:
        return LATENCY_S
    return max(0.0, handover.request_s - MESSAGES * config.control_latency_s)


def describe(found: StepTimeFit, handover: HandoverTime | None = None) -> str:
    """One line: from how much, how well."""
    pair = (
        ""
        if handover is None
        else (f"; hand-over {1000 * handover.request_s:.1f} ms and {1e6 * handover.token_s:.1f} us a token")
    )
    return (
        f"measured: {found.num_prefills} prefills (median error {100 * found.prefill_error:.1f} %), "
        f"{found.num_gaps} decode steps ({100 * found.decode_error:.1f} %){pair}"
    )


def _read_profile(path: str) -> Profile:
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"--gpu-profile {path}: cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--gpu-profile {path}: is no profile (--save-profile writes one): {error}") from None
    if found.step_time is None and found.gpu is None:
        raise ConfigError(f"--gpu-profile {path}: has neither `step_time` nor `gpu`")
    return found
