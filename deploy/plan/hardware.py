"""What each worker runs on: step times, memory and network, from flags, the table of GPUs or measurements.

Owns the profile file: JSON of `Profile`. Pure but for reading and writing it.
"""

from pathlib import Path

import msgspec

from deploy.plan.config import PlanConfig
from deploy.plan.fit import Fit, Handover, fit, fit_handover, read_records
from deploy.plan.gpus import GPUS, Gpu
from deploy.plan.shape import Shape
from deploy.plan.step_time import Efficiency, Fitted, Roofline, StepTime
from engine.config import ConfigError

OUTSIDE_MS = 5.0
LATENCY_MS = 0.5
MESSAGES = 4  # of a hand-over, one after another: handshake and answer, decode's pages, success
GB = 10**9


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured step times of one model on one machine. `source`: where they come from, for people.

    `handover`: None: not measured.
    """

    step_time: Fitted
    outside_s: float
    source: str = ""
    handover: Handover | None = None


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """`memory_bytes`: None where --max-total-tokens says it all."""

    step_time: StepTime
    memory_bytes: int | None
    link_bytes_per_s: float
    latency_s: float
    outside_s: float
    text: str


def hardware_of(config: PlanConfig, shape: Shape) -> Hardware:
    """Raises `ConfigError` for what is missing or cannot be read."""
    profile = _profile(config)
    gpu = GPUS[config.gpu] if config.gpu else None
    memory_gb = config.gpu_memory_gb or (gpu.memory_gb if gpu else None)
    handover = profile.handover if profile is not None else None
    link_bytes_per_s = _link_bytes_per_s(config, gpu, handover, shape)
    if memory_gb is None and config.max_total_tokens is None:
        raise ConfigError("--gpu-memory-gb: step times say nothing of memory; give this, --max-total-tokens or --gpu")
    if link_bytes_per_s is None:
        raise ConfigError("--transfer-gb-s: step times say nothing of the network; give this, --fit-pair or --gpu")
    step_time: StepTime
    if profile is not None:
        step_time, text = profile.step_time, profile.source or "measured step times"
    else:
        assert gpu is not None, "checked"
        efficiency = Efficiency(
            compute=config.compute_efficiency, memory=config.memory_efficiency, step_s=config.step_overhead_ms / 1000
        )
        step_time, text = Roofline(gpu=gpu, shape=shape, efficiency=efficiency), f"{gpu.name}, by its data sheet"
    measured_ms = OUTSIDE_MS if profile is None else 1000 * profile.outside_s
    outside_ms = measured_ms if config.request_overhead_ms is None else config.request_overhead_ms
    return Hardware(
        step_time=step_time,
        memory_bytes=None if memory_gb is None else int(memory_gb * GB),
        link_bytes_per_s=link_bytes_per_s,
        latency_s=_latency_s(config, handover),
        outside_s=outside_ms / 1000,
        text=text,
    )


def _link_bytes_per_s(config: PlanConfig, gpu: Gpu | None, handover: Handover | None, shape: Shape) -> float | None:
    if config.transfer_gb_s is not None:
        return config.transfer_gb_s * GB
    if handover is not None and handover.token_s > 0:
        return shape.kv_bytes / handover.token_s
    return gpu.link_gb_s * GB if gpu else None


def _latency_s(config: PlanConfig, handover: Handover | None) -> float:
    """What a measured hand-over takes besides bytes and messages."""
    if config.transfer_latency_ms is not None:
        return config.transfer_latency_ms / 1000
    if handover is None:
        return LATENCY_MS / 1000
    return max(0.0, handover.request_s - MESSAGES * config.control_latency_ms / 1000)


def _profile(config: PlanConfig) -> Profile | None:
    if config.profile is not None:
        return _read_profile(config.profile)
    if not config.fit:
        return None
    found = fit([read_records(path) for path in config.fit])
    handover = fit_handover(found, read_records(config.fit_pair)) if config.fit_pair else None
    profile = Profile(
        step_time=found.step_time, outside_s=found.outside_s, source=describe(found, handover), handover=handover
    )
    if config.save_profile:
        Path(config.save_profile).write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    return profile


def describe(found: Fit, handover: Handover | None = None) -> str:
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
        return msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"--profile {path}: cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--profile {path}: is no profile (--save-profile writes one): {error}") from None
