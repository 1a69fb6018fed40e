"""Detection of GPUDirect RDMA from Linux. Decisions are pure. Never run with RDMA."""

import re
from dataclasses import dataclass
from pathlib import Path

PEER_MEMORY = {"nvidia_peermem", "nv_peer_mem"}
DMABUF_SINCE = (5, 12)  # Linux version whose InfiniBand drivers register dma-buf regions
REMEDY = "load it (modprobe nvidia-peermem), or use NVIDIA's open kernel modules with Linux 5.12 or newer (dmabuf)"


@dataclass(frozen=True)
class RdmaFacts:
    has_rdma: bool
    modules: str = ""
    kernel: str = ""
    driver: str = ""

    @property
    def reaches_gpu(self) -> bool:
        """RDMA is present, with peer memory or dma-buf."""
        return self.has_rdma and (self._has_peer_memory or self._has_dmabuf)

    @property
    def shortfall(self) -> str | None:
        """Return a warning if RDMA devices cannot reach GPU memory."""
        if not self.has_rdma or self.reaches_gpu:
            return None
        return (
            "there are RDMA devices, but neither nvidia-peermem is loaded nor do kernel and driver have dmabuf: KV of a GPU goes "
            f"by way of the host, at a fraction of the rate; {REMEDY}"
        )

    @property
    def _has_peer_memory(self) -> bool:
        return any(line.split(" ", 1)[0] in PEER_MEMORY for line in self.modules.splitlines())

    @property
    def _has_dmabuf(self) -> bool:
        release = re.match(r"(\d+)\.(\d+)", self.kernel)
        new = release is not None and (int(release[1]), int(release[2])) >= DMABUF_SINCE
        return new and "Open Kernel Module" in self.driver


def rdma_facts() -> RdmaFacts:
    return RdmaFacts(
        has_rdma=any(Path("/sys/class/infiniband").glob("*")),
        modules=_text("/proc/modules"),
        kernel=_text("/proc/sys/kernel/osrelease"),
        driver=_text("/proc/driver/nvidia/version"),
    )


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
