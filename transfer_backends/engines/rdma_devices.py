"""RDMA devices by SGLang's flag. Pure, except for `devices_here`. Never run with RDMA."""

from collections.abc import Collection, Mapping
from pathlib import Path

from transfer_backends.contract import BackendUnavailable

IB_FLAG = "--disaggregation-ib-device"
UCX_VARIABLE = "UCX_NET_DEVICES"
PORT = 1  # of a device: UCX names ports, Mooncake takes the first active one


def devices_here() -> list[str]:
    return sorted(found.name for found in Path("/sys/class/infiniband").glob("*"))


def named_devices(text: str | None, *, here: Collection[str]) -> tuple[str, ...]:
    """() lets the engine choose. Raises BackendUnavailable."""
    if text is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in here:
            what = f"there is no {name!r}" if name else f"{text!r} holds an empty name"
            there = f"has {', '.join(here)}" if here else "is empty or absent"
            raise BackendUnavailable(f"{IB_FLAG}: {what}; /sys/class/infiniband {there}")
    return names


def ucx_settings(devices: Collection[str], env: Mapping[str, str]) -> dict[str, str]:
    """Raises BackendUnavailable if `env` names other devices."""
    if not devices:
        return {}
    wanted = ",".join(f"{name}:{PORT}" for name in devices)
    if env.get(UCX_VARIABLE, wanted) != wanted:
        raise BackendUnavailable(
            f"{IB_FLAG}: {','.join(devices)} contradicts {UCX_VARIABLE}={env[UCX_VARIABLE]}; unset one"
        )
    return {UCX_VARIABLE: wanted}
