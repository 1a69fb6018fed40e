"""Green contexts: CUDA streams whose kernels run on some multiprocessors (SMs).

By cuda-bindings, a requirement of torch for CUDA: two of torch.cuda.green_contexts may overlap, and
their streams have no priority. After FlashInfer's green_ctx.py and SGLang's PD multiplexing.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine.core.plan import Phase
from engine.pdmux.cuda_lane import Partition


class NotDivisible(Exception):
    """The GPU or its driver has no green contexts."""


def divided(
    device: torch.device, decode_sms: Sequence[int], *, order: Mapping[Phase, int]
) -> list[dict[Phase, Partition]]:
    """Return a pair of partitions for each number of decodes' SMs. Raises NotDivisible."""
    if not decode_sms:
        raise NotDivisible("it has too few")
    driver = _Driver()
    gpu = driver.call("cuDeviceGet", device.index)
    whole = driver.call("cuDeviceGetDevResource", gpu, driver.api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    found = []
    for sms in decode_sms:
        [decodes], _, prompts = driver.call("cuDevSmResourceSplitByCount", 1, whole, 0, sms)
        of_phase = {Phase.DECODE: decodes, Phase.PREFILL: prompts}
        streams = {phase: driver.stream(gpu, of_phase[phase], priority) for phase, priority in order.items()}
        found.append(
            {
                phase: Partition(
                    torch.cuda.ExternalStream(stream, device=device),  # type: ignore[no-untyped-call]
                    sms=of_phase[phase].sm.smCount,
                    others=whole.sm.smCount - of_phase[phase].sm.smCount,
                )
                for phase, stream in streams.items()
            }
        )
    return found


class _Driver:
    def __init__(self) -> None:
        try:
            self.api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise NotDivisible(f"{error}; install cuda-bindings") from None

    def call(self, name: str, *args: Any) -> Any:
        try:
            status, *values = getattr(self.api, name)(*args)
        except (AttributeError, RuntimeError, TypeError) as error:  # an old driver, or other bindings
            raise NotDivisible(f"{name}: {error}") from None
        if status != self.api.CUresult.CUDA_SUCCESS:
            raise NotDivisible(f"{name} says {status.name}")
        return values[0] if len(values) == 1 else tuple(values)

    def stream(self, gpu: Any, sms: Any, priority: int) -> int:
        description = self.call("cuDevResourceGenerateDesc", [sms], 1)
        flag = self.api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM  # required
        context = self.call("cuGreenCtxCreate", description, gpu, flag)
        non_blocking = self.api.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self.call("cuGreenCtxStreamCreate", context, non_blocking, priority))
