"""Transport of a trial write from evidence, and causes of slow GPU transfers. Pure."""

import contextlib
import os
import re
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

# ---- Detection of GPUDirect RDMA from Linux. Decisions are pure. Never run with RDMA.

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


# ---- Bytes delivered by this process's TCP sockets: evidence of a write's transport.

BYTES_ACKED = struct.Struct("=Q")
AT = 120  # of tcpi_bytes_acked in struct tcp_info (linux/tcp.h, since Linux 4.1)


def tcp_bytes_acked() -> dict[int, int] | None:
    """By socket inode; None if unknown."""
    try:
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return None
    found: dict[int, int] = {}
    for number in descriptors:
        with contextlib.suppress(OSError):  # closed meanwhile, or not TCP
            status = os.fstat(number)
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(number)) as copy:
                    found[status.st_ino] = _acked(copy)
    return found


def _acked(opened: socket.socket) -> int:
    if opened.family not in (socket.AF_INET, socket.AF_INET6) or opened.type != socket.SOCK_STREAM:
        raise OSError("not a TCP socket")
    info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, AT + BYTES_ACKED.size)
    if len(info) < AT + BYTES_ACKED.size:
        raise OSError("a kernel older than the field")
    return int(BYTES_ACKED.unpack_from(info, AT)[0])


# ---- transports

UNKNOWN, TCP, RDMA, CMA, CUDA_IPC, NVLINK = "unknown", "tcp", "rdma", "cma", "cuda_ipc", "nvlink"
SLOW_GPU_BYTES_A_S = 5e9  # RDMA has 10 GB/s and more, CUDA IPC 50 and more, TCP through the host 1 to 3


@dataclass(frozen=True)
class Evidence:
    """TCP bytes of the trial's time: on new sockets, and on all."""

    size_bytes: int
    seconds: float
    new_tcp_bytes: int | None
    all_tcp_bytes: int | None

    @property
    def bytes_a_s(self) -> float:
        return self.size_bytes / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Surroundings:
    """Facts about the peer; `near`: same machine, `one_namespace`: same pids."""

    near: bool | None
    one_namespace: bool | None
    rdma: RdmaFacts
    inside: str
    backend: str
    ucx_tls: str = ""


def surroundings_of(
    mine: str, theirs: str, *, rdma: RdmaFacts, inside: str, backend: str, ucx_tls: str
) -> Surroundings:
    known = bool(mine and theirs)
    return Surroundings(
        near=mine.partition("/")[0] == theirs.partition("/")[0] if known else None,
        one_namespace=mine == theirs if known else None,
        rdma=rdma,
        inside=inside,
        backend=backend,
        ucx_tls=ucx_tls,
    )


def name_transport(seen: Evidence, around: Surroundings) -> str:
    """The transport if only one can have carried the bytes."""
    half = seen.size_bytes / 2
    if seen.new_tcp_bytes is None or seen.all_tcp_bytes is None:
        return UNKNOWN
    if seen.new_tcp_bytes >= half:
        return TCP
    if seen.all_tcp_bytes >= half or around.near is None:  # older connections were busy: this peer's or another's
        return UNKNOWN
    if around.near or around.inside == NVLINK:
        return UNKNOWN if around.rdma.has_rdma else around.inside
    return RDMA if around.rdma.has_rdma else UNKNOWN


def explain_slow_gpu(transport: str, seen: Evidence, around: Surroundings) -> str | None:
    """Cause and remedy for GPU pages over TCP or below 5 GB/s."""
    if transport != TCP and seen.bytes_a_s >= SLOW_GPU_BYTES_A_S:
        return None
    if around.inside == NVLINK:
        return "there may be no NVLink between these two GPUs; look at `nvidia-smi topo -m`"
    return _inside_cause(around) if around.near else _outside_cause(around)


def _inside_cause(around: Surroundings) -> str:
    if around.backend != "nixl":
        return (
            "Mooncake goes by way of the host between the GPUs of one machine; use --disaggregation-mooncake-protocol "
            "nvlink_intra, or --disaggregation-transfer-backend nixl"
        )
    if around.one_namespace is False:
        return (
            "both workers are on one machine in different PID namespaces, between which UCX shares no GPU memory; run them in "
            "one (Kubernetes: one pod with shareProcessNamespace, or hostPID; Docker: --pid), or give them RDMA devices"
        )
    if around.ucx_tls and not {"cuda_ipc", "cuda", "all"} & set(around.ucx_tls.split(",")):
        return f"UCX_TLS={around.ucx_tls} leaves cuda_ipc out; unset it, or add cuda_ipc,cuda_copy"
    return "UCX found no way between the two GPUs; look at `nvidia-smi topo -p2p r`, and at what UCX chose with UCX_PROTO_INFO=y"


def _outside_cause(around: Surroundings) -> str:
    if not around.rdma.has_rdma:
        return "this worker sees no RDMA device (/sys/class/infiniband); give both workers one"
    if not around.rdma.reaches_gpu:
        return f"nvidia-peermem is not loaded, and there is no dmabuf; {REMEDY}"
    return (
        "RDMA was not taken or is slow; look at the memlock limit of both workers (`ulimit -l`), at UCX_TLS and UCX_NET_DEVICES, "
        "and at what UCX chose with UCX_PROTO_INFO=y"
    )
