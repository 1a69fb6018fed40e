"""Whether a network card can reach a GPU's memory, by what Linux says of itself. The decisions are pure. Never run beside RDMA."""

import re
from dataclasses import dataclass
from pathlib import Path

PEER_MEMORY = {"nvidia_peermem", "nv_peer_mem"}
DMABUF_SINCE = (5, 12)  # of Linux: the InfiniBand drivers register dma-buf regions
REMEDY = "load it (modprobe nvidia-peermem), or use NVIDIA's open kernel modules with Linux 5.12 or newer (dmabuf)"


@dataclass(frozen=True)
class RdmaFacts:
    """`modules`: of /proc/modules. `kernel`: its release. `driver`: NVIDIA's, of /proc/driver/nvidia/version."""

    has_rdma: bool
    modules: str = ""
    kernel: str = ""
    driver: str = ""

    @property
    def reaches_gpu(self) -> bool:
        """RDMA devices are here, and one of the two ways into a GPU's memory."""
        return self.has_rdma and (self._has_peer_memory or self._has_dmabuf)

    @property
    def shortfall(self) -> str | None:
        """Return one line with the remedy where RDMA devices cannot reach a GPU's memory; None where there are none, too."""
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
    """Read this machine's. What cannot be read counts as not there."""
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
