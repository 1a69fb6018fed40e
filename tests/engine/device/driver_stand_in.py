"""A CUDA driver that divides multiprocessors as NVIDIA's does, as far as green contexts need it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 914


@dataclass(frozen=True)
class Resource:
    """Multiprocessors by number."""

    sms: frozenset[int]

    @property
    def sm(self) -> SimpleNamespace:
        return SimpleNamespace(smCount=len(self.sms))


@dataclass
class Driver:
    """`least`, `step`: of SMs that a split gives. `streams`: SMs and priority by handle."""

    num_sms: int = 132
    least: int = 8
    step: int = 8
    broken: str = ""  # a call that fails
    missing: str = ""  # one that this driver has not
    streams: dict[int, tuple[frozenset[int], int]] = field(default_factory=dict)

    def module(self) -> ModuleType:
        found = ModuleType("cuda.bindings.driver")
        calls = [name for name in dir(self) if name.startswith("cu")]
        found.__dict__.update({name: self._checked(name) for name in calls})
        found.__dict__["CUresult"] = CUresult
        found.__dict__["CUdevResourceType"] = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
        found.__dict__["CUgreenCtxCreate_flags"] = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
        found.__dict__["CUstream_flags"] = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
        return found

    def _checked(self, name: str) -> Any:
        def call(*args: Any) -> tuple[Any, ...]:
            if name == self.missing:
                raise RuntimeError(f'Function "{name}" not found')
            if name == self.broken:
                return (CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,)
            found = getattr(self, name)(*args)
            return (CUresult.CUDA_SUCCESS, *(found if isinstance(found, tuple) else (found,)))

        return call

    def cuDeviceGet(self, index: int) -> str:
        return f"GPU {index}"

    def cuDeviceGetDevResource(self, gpu: str, kind: int) -> Resource:
        assert kind == 1 and gpu == "GPU 0"
        return Resource(frozenset(range(self.num_sms)))

    def cuDevSmResourceSplitByCount(
        self, groups: int, whole: Resource, flags: int, least: int
    ) -> tuple[list[Resource], int, Resource]:
        assert (groups, flags) == (1, 0)
        size = max(self.least, -(-least // self.step) * self.step)
        ordered = sorted(whole.sms)
        return [Resource(frozenset(ordered[:size]))], 1, Resource(frozenset(ordered[size:]))

    def cuDevResourceGenerateDesc(self, resources: Sequence[Resource], count: int) -> Resource:
        assert count == len(resources) == 1 and resources[0].sms, "a context needs SMs"
        return resources[0]

    def cuGreenCtxCreate(self, description: Resource, gpu: str, flags: int) -> Resource:
        assert flags == 1, "required"
        return description

    def cuGreenCtxStreamCreate(self, context: Resource, flags: int, priority: int) -> int:
        assert flags == 1, "it would wait for the default stream"
        self.streams[100 + len(self.streams)] = (context.sms, priority)
        return max(self.streams)


def install(monkeypatch: pytest.MonkeyPatch, driver: Driver, *, major: int = 9) -> None:
    gpu = SimpleNamespace(multi_processor_count=driver.num_sms, major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver.module())
