"""GPU memory of this process, counted by torch."""

import torch

CONTEXT_BYTES = 768 << 20  # CUDA's context and loaded kernels, uncounted by torch: an estimate


class CudaGauge:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def own(self) -> int:
        return int(torch.cuda.memory_reserved(self._device)) + CONTEXT_BYTES

    def begin_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return int(torch.cuda.max_memory_reserved(self._device)) + CONTEXT_BYTES

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
