"""Step times, memory and network of workers."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.flags.speculation import NGRAM
from engine.model_files.model_config import ModelConfig
from planner.config import HardwareFlags, PlanConfig
from planner.fit import HandoverTime, Profile, fit_profile, read_profile, save_profile
from planner.memory import DrafterTime, by_roofline, by_weights, drafter_shape
from planner.step_time import GPUS, Beside, Efficiency, Fitted, Gpu, Roofline, Shape, StepTime, shape_of
from service.flags import ConfigError

# Defaults without flag or profile.
COMPUTE, MEMORY, STEP_S, REDUCE_S = 0.55, 0.75, 0.002, 0.00001
OUTSIDE_S = 0.005
ACCEPT_RATE = 0.7
LATENCY_S = 0.0005
MESSAGES = 4  # sequential messages of a hand-over: handshake, reply, decode's pages, success
GB = 10**9
PROFILES = Path(__file__).parent / "profiles"  # written by `make gpu-profile`


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """Values are per GPU. `step_times`: by GPUs per worker.

    `memory_bytes`: None with --max-total-tokens. `gpu_flag`: chose the GPU. `assumed`: a text for
    the user. `accept_rate`: None without drafts.
    """

    step_times: dict[int, StepTime]
    drafter_times: dict[int, DrafterTime]
    accept_rate: float | None
    match_rate: float
    memory_bytes: int | None
    link_bytes_per_s: float
    latency_s: float
    outside_s: float
    gpu_flag: str
    text: str
    assumed: str
    beside: Beside


def hardware_of(config: PlanConfig, model: ModelConfig, *, tps: Sequence[int], profile: Profile | None) -> Hardware:
    """`tps`: GPUs per worker. Raises ConfigError."""
    shape = shape_of(model)
    profile = profile or Profile()
    gpu = GPUS[config.gpu] if config.gpu else profile.gpu
    if gpu is not None and profile.gpu is not None and profile.gpu.name == gpu.name:
        gpu = profile.gpu  # with its memory as measured
    memory_gb = config.gpu_memory_gb or (gpu.memory_gb if gpu else None)
    if memory_gb is None and config.max_total_tokens is None:
        raise ConfigError("--gpu-memory-gb: step times say nothing of memory; give this, --max-total-tokens or --gpu")
    link_bytes_per_s = _link_bytes_per_s(config.transfer_gb_s, gpu, profile.handover, shape)
    assumed = _Assumed()
    step_times: dict[int, StepTime]
    if profile.step_time is not None:
        if list(tps) != [profile.tp_size]:
            raise ConfigError(
                f"--tp-size: the step times were measured on {profile.tp_size} GPUs a worker; plan with as many"
            )
        step_times, text = {profile.tp_size: profile.step_time}, profile.source or "measured step times"
    else:
        assert gpu is not None, "checked"
        efficiency = _efficiency(config, profile, assumed, several_gpus=max(tps) > 1)
        shapes = {tp: shape_of(model, tp, on_cpu=config.host_cores is not None) for tp in tps}
        step_times = {tp: Roofline(gpu=gpu, shape=shapes[tp], efficiency=efficiency, tp=tp) for tp in tps}
        text = f"{gpu.name}, {profile.source or 'by its data sheet'}"
    if config.transfer_gb_s is None and profile.handover is None:
        assumed.notes.append(f"transfers at {link_bytes_per_s / GB:g} GB/s a GPU")
    gpu_flag = f"--gpu {config.gpu}" if config.gpu else "--gpu-profile"
    measured_latency_s = None
    if profile.handover is not None:
        measured_latency_s = max(0.0, profile.handover.request_s - MESSAGES * config.control_latency_s)
    drafter_times = {}
    if model.drafter:
        drafter_times = {tp: _drafter_time(config, model, tp, time, assumed) for tp, time in step_times.items()}
    return Hardware(
        step_times=step_times,
        drafter_times=drafter_times,
        accept_rate=_accept_rate(config, profile, assumed),
        match_rate=_match_rate(config, profile, assumed),
        memory_bytes=None if memory_gb is None else int(memory_gb * GB),
        link_bytes_per_s=link_bytes_per_s,
        latency_s=assumed.first(config.transfer_latency_s, measured_latency_s, LATENCY_S),
        outside_s=assumed.first(
            config.request_overhead_s,
            profile.outside_s,
            OUTSIDE_S,
            f"{1e3 * OUTSIDE_S:g} ms a request outside the engine",
        ),
        gpu_flag=gpu_flag if config.gpu_memory_gb is None else "--gpu-memory-gb",
        text=text,
        assumed=", ".join(assumed.notes),
        beside=profile.beside,
    )


def profile_of(config: PlanConfig) -> Profile | None:
    """Read, or fit and save, the profile; None with a data sheet."""
    if config.gpu_profile is not None:
        return read_profile(config.gpu_profile)
    if not config.fit:
        return shipped_profile(config.gpu)
    if len(config.tp_size) > 1:
        raise ConfigError("--tp-size: --fit measures one kind of worker; say how many GPUs that had")
    profile = fit_profile(config.fit, pair=config.fit_pair, tp_size=config.tp_size[0] if config.tp_size else 1)
    if config.save_profile:
        save_profile(profile, config.save_profile)
    return profile


def shipped_profile(gpu: str | None) -> Profile | None:
    path = PROFILES / f"{(gpu or '').lower()}.json"
    return read_profile(str(path)) if path.is_file() else None


class _Assumed:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def first(self, given: float | None, measured: float | None, default: float, note: str = "") -> float:
        """`default` is noted for the user."""
        for value in (given, measured):
            if value is not None:
                return value
        if note:
            self.notes.append(note)
        return default


def _efficiency(config: HardwareFlags, profile: Profile, assumed: _Assumed, *, several_gpus: bool) -> Efficiency:
    step_s = None if profile.step_overhead_ms is None else profile.step_overhead_ms / 1e3
    reduce_s = None if profile.all_reduce_us is None else profile.all_reduce_us / 1e6
    reduce_note = f"{1e6 * REDUCE_S:g} us an all-reduce besides" if several_gpus else ""
    return Efficiency(
        compute=assumed.first(
            config.compute_efficiency, profile.compute_efficiency, COMPUTE, f"{100 * COMPUTE:.0f} % of its FLOP/s"
        ),
        memory=assumed.first(
            config.memory_efficiency, profile.memory_efficiency, MEMORY, f"{100 * MEMORY:.0f} % of its bandwidths"
        ),
        step_s=assumed.first(config.step_overhead_s, step_s, STEP_S, f"{1e3 * STEP_S:g} ms a step besides"),
        reduce_s=assumed.first(config.all_reduce_overhead_s, reduce_s, REDUCE_S, reduce_note),
    )


def _drafter_time(config: HardwareFlags, model: ModelConfig, tp: int, time: StepTime, assumed: _Assumed) -> DrafterTime:
    on_cpu = config.host_cores is not None
    shape = drafter_shape(model, tp, on_cpu=on_cpu)
    if isinstance(time, Roofline):
        return by_roofline(time, shape)
    assert isinstance(time, Fitted), time
    assumed.notes.append("the drafter's times as the model's, by their weights")
    return by_weights(time, shape_of(model, tp, on_cpu=on_cpu), shape)


def _accept_rate(config: PlanConfig, profile: Profile, assumed: _Assumed) -> float | None:
    if config.speculative_algorithm is None:
        return None
    note = f"{100 * ACCEPT_RATE:.0f} % of drafted tokens accepted"
    return assumed.first(config.speculative_accept_rate, profile.accept_rate, ACCEPT_RATE, note)


def _match_rate(config: PlanConfig, profile: Profile, assumed: _Assumed) -> float:
    if config.speculative_algorithm != NGRAM:
        return 1.0
    return assumed.first(config.speculative_match_rate, profile.match_rate, 1.0, "n-grams match at each step")


def _link_bytes_per_s(given_gb_s: float | None, gpu: Gpu | None, handover: HandoverTime | None, shape: Shape) -> float:
    if given_gb_s is not None:
        return given_gb_s * GB
    if handover is not None and handover.token_s > 0:
        return shape.kv_bytes / handover.token_s
    if gpu is not None:
        return gpu.link_gb_s * GB
    if handover is not None:
        raise ConfigError("--transfer-gb-s: the measured hand-over does not grow with the prompt; give this or --gpu")
    raise ConfigError("--transfer-gb-s: step times say nothing of the network; give this, --fit-pair or --gpu")
