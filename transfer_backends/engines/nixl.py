"""NIXL over UCX: shared memory or CMA on one host, TCP between hosts. RDMA and CUDA IPC never ran.

Measured:

- No progress thread (it spins on a core): the target polls `progress`, the initiator its
  operations.
- Sync mode STRICT: the control thread polls while the sender thread posts (NONE crashes).
- Never release a pending handle: that does not cancel, the bytes keep landing.
- A failed operation may have bytes under way; a fence is a tiny write that flushes the endpoint.
- Its wheel (1.5.1) crashes in a destructor of libnl-route at exit: `leave_without_destructors`.
- A peer lost by an error stays unusable until disconnect + connect.
"""

import contextlib
import ctypes
import importlib
import logging
import os
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from service.security.browser import is_loopback
from transfer_backends.contract import TCP_RESEND_S, BackendUnavailable, Caps, EngineError, OpState, Pieces, Region
from transfer_backends.engines.cuda_context import CudaContext
from transfer_backends.engines.environment import (
    UCX_VARIABLE,
    defaults_inside,
    devices_here,
    named_devices,
    quiet,
    set_defaults,
    ucx_settings,
)
from transfer_backends.engines.mooncake_protocols import of_gpu
from transfer_backends.engines.trial_memory import TrialMemory, trial_pieces
from transfer_backends.engines.wheels import NIXL, installed_torch, wheel_of
from transfer_backends.transports import CMA, CUDA_IPC, UNKNOWN

SETTINGS = {
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "error",
    # If a machine vanishes, the kernel would retry for 15 minutes and hold the pages it reads.
    "UCX_TCP_USER_TIMEOUT": "20s",
}
LOCAL = {UCX_VARIABLE: "lo"}
GPU_SETTINGS = {
    # UCX would otherwise map a peer's whole pool for our lifetime; a dead peer's memory stays taken
    # (nixl#1066).
    "UCX_CUDA_IPC_CACHE": "n",
    "NIXL_UCX_SGL_ENABLE": "1",  # one batched copy per post: CUDA 13's library has it, others ignore it
}
KERNEL_COPIERS = ("/dev/xpmem", "/dev/knem")  # UCX may use them instead of CMA
FENCE_BYTES = 8
SCRATCH_BYTES = 4096

log = logging.getLogger(__name__)


class _Descriptor(msgspec.Struct, frozen=True, array_like=True):
    metadata: bytes
    scratch_ptr: int
    trial: Region


@dataclass(eq=False)
class NixlPeer:
    name: str
    scratch_ptr: int
    trial: Region


@dataclass(eq=False)
class NixlOp:
    handle: Any
    state: OpState


def import_nixl() -> Any:
    """Import the meta package's module, or a CUDA wheel's."""
    set_defaults(SETTINGS)
    errors = []
    for name in ("nixl", "nixl_cu13", "nixl_cu12"):
        try:
            module = importlib.import_module(f"{name}._api")
        except (ImportError, OSError) as error:
            errors.append(f"{name}: {error}")
            continue
        if hasattr(module, "nixl_agent"):
            return module
        errors.append(f"{name} has no nixl_agent")
    torch = installed_torch()
    raise BackendUnavailable(
        f"transfer backend nixl: its library cannot be imported; install it with: pip install {wheel_of(NIXL, torch)} "
        f"(for torch {torch}) ({'; '.join(errors)})"
    )


def leave_without_destructors() -> None:
    """End the process by `_exit(status)` before destructors of shared libraries.

    Otherwise a process with an agent dies of SIGSEGV at its end. glibc's `on_exit` passes the
    status; handlers of libraries loaded earlier are skipped.
    """
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # not glibc
        libc.on_exit(libc._exit, None)


class NixlEngine:
    def __init__(self, *, host: str, device: int | None = None, ib_device: str | None = None) -> None:
        """UCX listens on every device unless `host` is loopback or `ib_device` is set.

        It reads its settings only here.
        """
        self.caps = Caps(
            name="nixl",
            max_inflight=4096,
            max_inflight_bytes=64 << 20,
            max_post_pieces=1024,
            max_post_bytes=16 << 20,  # a post over CMA copies before it returns
            max_piece_bytes=4 << 20,
            target_must_poll=True,
            settle_s=2.0,
            resend_s=TCP_RESEND_S,
            inside_machine=UNKNOWN if any(map(os.path.exists, KERNEL_COPIERS)) else CMA,
        )
        devices = ucx_settings(named_devices(ib_device, here=devices_here()), os.environ)
        if is_loopback(host):
            devices = {**LOCAL, **devices}
        elif os.environ.get(UCX_VARIABLE) == LOCAL[UCX_VARIABLE]:
            log.warning(
                "%s=lo, and this worker's address is %s: KV reaches no other machine; unset it", UCX_VARIABLE, host
            )
        self._device = device
        self._context: CudaContext | None = None
        if device is not None:
            set_defaults(GPU_SETTINGS)
            self.caps = of_gpu(self.caps, inside_machine=CUDA_IPC)
            self._context = CudaContext(device)
        api = import_nixl()
        config = api.nixl_agent_config(
            enable_prog_thread=False, backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        try:
            with defaults_inside(devices), quiet(1):
                self._agent = api.nixl_agent(uuid.uuid4().hex, config)
        except Exception as error:
            raise BackendUnavailable(f"transfer backend nixl: UCX cannot start: {error}") from None
        leave_without_destructors()
        self._scratch = np.zeros(SCRATCH_BYTES, np.uint8)
        self._trial = TrialMemory(device, self._context)
        self._registered: list[Any] = []
        # Adding and removing peers during other calls crashes UCX (vllm#49238, LightLLM#1470).
        self._membership = threading.Lock()
        self._closed = False

    def register(self, regions: Sequence[Region]) -> None:
        assert all(region.device in (None, self._device) for region in regions), "memory of another GPU"
        self._enter()
        scratch = Region(self._scratch.ctypes.data, 1, SCRATCH_BYTES, None)
        for region in (*regions, scratch, self._trial.region):
            rows = [(region.base_ptr, region.size_bytes, region.device or 0, "")]
            self._registered.append(self._agent.register_memory(rows, _kind(region.device)))

    def descriptor(self) -> bytes:
        known = _Descriptor(self._agent.get_agent_metadata(), self._scratch.ctypes.data, self._trial.region)
        return msgspec.msgpack.encode(known)

    def _enter(self) -> None:
        if self._context is not None:
            self._context.enter()

    def connect(self, incarnation: str, descriptor: bytes) -> NixlPeer:
        self._enter()
        try:
            known = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except msgspec.MsgspecError as error:
            raise EngineError(f"not a NIXL descriptor: {error}") from None
        with self._membership:
            try:
                name = self._agent.add_remote_agent(known.metadata)
            except Exception as error:
                raise EngineError(f"NIXL refused the peer's metadata: {error}") from None
        return NixlPeer(name.decode() if isinstance(name, bytes) else name, known.scratch_ptr, known.trial)

    def disconnect(self, peer: NixlPeer) -> None:
        self._enter()
        with self._membership:
            self._agent.remove_remote_agent(peer.name)

    def post(self, peer: NixlPeer, pieces: Pieces) -> NixlOp:
        self._enter()
        local = self._agent.get_xfer_descs(_rows(pieces.src, pieces, pieces.src_device), _kind(pieces.src_device))
        remote = self._agent.get_xfer_descs(_rows(pieces.dst, pieces, pieces.dst_device), _kind(pieces.dst_device))
        try:
            handle = self._agent.initialize_xfer("WRITE", local, remote, peer.name)
        except Exception as error:
            raise EngineError(f"NIXL refused the transfer: {error}") from None
        op = NixlOp(handle, OpState.PENDING)
        self._note(op, lambda: self._agent.transfer(handle))
        return op

    def probe(self, peer: NixlPeer) -> NixlOp:
        return self.post(peer, Pieces.one(self._scratch.ctypes.data, peer.scratch_ptr, FENCE_BYTES))

    def trial(self, peer: NixlPeer) -> tuple[NixlOp, int]:
        pieces = trial_pieces(self._trial.region, peer.trial)
        return self.post(peer, pieces), pieces.size_bytes

    def fence(self, peer: NixlPeer) -> NixlOp:
        return self.probe(peer)

    def poll(self, op: NixlOp) -> OpState:
        if op.state is OpState.PENDING:
            self._enter()
            self._note(op, lambda: self._agent.check_xfer_state(op.handle))
        return op.state

    def _note(self, op: NixlOp, call: Any) -> None:
        try:
            answer = call()
        except Exception:  # nixlRemoteDisconnectError and the like: NIXL's report of a failed operation
            answer = "ERR"
        if answer == "PROC":
            return
        op.state = OpState.DONE if answer == "DONE" else OpState.FAILED
        with contextlib.suppress(Exception):
            op.handle.release()

    def progress(self, *, eager: bool = False) -> None:
        self._enter()
        self._agent.get_new_notifs()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for registered in self._registered:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(registered)
        del self._agent
        self._trial.close()


def _kind(device: int | None) -> str:
    return "DRAM" if device is None else "VRAM"


def _rows(addresses: Any, pieces: Pieces, device: int | None) -> Any:
    rows = np.empty((len(pieces), 3), np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = pieces.lengths
    rows[:, 2] = device or 0
    return rows
