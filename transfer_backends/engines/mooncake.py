"""Mooncake transfer engine over TCP. On a host with an HCA the library chooses RDMA; that has never been run. No NVLink.

Its measured behaviour decides how it is used here:
- batch calls misreport completion (they return while accepted writes still land), so every piece is submitted and checked by
  itself. The end of one that is DONE is exact. One that FAILED may land later: bytes of a dropped connection arrived 0.6 s
  after the network was whole again;
- ids are raw pointers: never polled again after their end;
- its queues stall for ever when they overflow: the settings raise them, and `caps.max_inflight` stays far below;
- sync calls spin on a core: never used.
"""

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from transfer_backends.contract import TCP_RESEND_S, BackendUnavailable, Caps, EngineError, OpState, Pieces, Region
from transfer_backends.engines.cuda_context import CudaContext
from transfer_backends.engines.environment import quiet, set_defaults
from transfer_backends.engines.trial_memory import TrialMemory, trial_pieces
from transfer_backends.engines.wheels import MOONCAKE, installed_torch, torch_cuda_major, wheel_of

SETTINGS = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "600000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TRANSFER_TIMEOUT": "30",
    "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "2",
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_SLICE_SIZE": str(2 << 20),  # of a GPU's memory: one blocking cudaMemcpy a slice; nothing to host memory
}
NVLINK = ("MC_INTRANODE_NVLINK", "MC_INTRA_NVLINK", "MC_FORCE_MNNVL")
FORCED = {"MC_FORCE_TCP", "MC_FORCE_HCA"}
SCRATCH_BYTES = 4096
PROBE_BYTES = 8
PENDING, DONE, FAILED, OVERDUE = 0, 1, -1, -2  # of transfer_check_status; OVERDUE is still pending


class _Descriptor(msgspec.Struct, frozen=True, array_like=True):
    session: str
    scratch_ptr: int
    trial: Region


def transport_settings(env: Mapping[str, str], *, has_hca: bool) -> dict[str, str]:
    """Return what chooses the transport, beside what `env` sets: RDMA where there is an HCA, else TCP.

    Raises BackendUnavailable for NVLink. Mooncake's NVLink transports register a GPU's memory alone, and metadata rows are host
    memory; MC_FORCE_MNNVL wants pools from its own allocator as well, and its wheels do without it silently. Mooncake asks
    whether a variable is there, not what it says, and MC_FORCE_TCP beats all others.
    """
    if (asked := next((name for name in NVLINK if name in env), None)) is not None:
        raise BackendUnavailable(
            f"transfer backend mooncake: {asked} is set, but Mooncake's NVLink transports take no host memory, where metadata "
            "rows are; unset it, and for NVLink within a machine use --disaggregation-transfer-backend nixl (UCX's cuda_ipc)"
        )
    return {} if has_hca or FORCED & env.keys() else {"MC_FORCE_TCP": "1"}


@dataclass(eq=False)
class MooncakePeer:
    session: str
    scratch_ptr: int
    trial: Region


@dataclass(eq=False)
class MooncakeOp:
    """`ids`: submitted and not known to be final, in order. `failed`: some piece was refused or failed."""

    ids: list[int]
    failed: bool


def import_mooncake() -> Any:
    try:
        return importlib.import_module("mooncake.engine")
    except (ImportError, OSError) as error:
        raise BackendUnavailable(cannot_import(error, torch=installed_torch())) from None


def cannot_import(error: Exception, *, torch: str | None) -> str:
    """Return the error's text: the wheel for the CUDA of `torch` (its version), which a wheel for another CUDA cannot replace."""
    providers = "" if torch_cuda_major(torch) is None else " ibverbs-providers"
    return (
        "transfer backend mooncake: its library cannot be imported; install it with: "
        f"pip install {wheel_of(MOONCAKE, torch)} (for torch {torch}) and "
        f"apt-get install libibverbs1 libnuma1 libcurl4{providers} ({error})"
    )


class MooncakeEngine:
    def __init__(self, *, host: str, device: int | None = None) -> None:
        """`host`: this machine's address for peers. `device`: the GPU of the pages, None: the host."""
        self.caps = Caps(
            name="mooncake",
            max_inflight=256,
            max_inflight_bytes=32 << 20,
            max_post_pieces=128,
            max_post_bytes=8 << 20,
            max_piece_bytes=4 << 20,
            target_must_poll=False,
            settle_s=2.0,
            resend_s=TCP_RESEND_S,
            full_window_s=0.001,
        )
        has_hca = any(Path("/sys/class/infiniband").glob("*"))
        set_defaults(SETTINGS | transport_settings(os.environ, has_hca=has_hca))
        module = import_mooncake()
        self._host = host
        self._scratch = np.zeros(SCRATCH_BYTES, np.uint8)
        self._trial = TrialMemory(device, None if device is None else CudaContext(device))
        self._addresses: list[int] = []
        with quiet(1, 2):
            self._engine: Any = module.TransferEngine()
            status = self._engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
        if status != 0:
            raise BackendUnavailable(
                f"transfer backend mooncake: the engine cannot start on {host} (status {status}); is the address this machine's?"
            )

    def register(self, regions: Sequence[Region]) -> None:
        scratch = Region(self._scratch.ctypes.data, 1, SCRATCH_BYTES, None)
        for region in (*regions, scratch, self._trial.region):
            status = self._engine.register_memory(region.base_ptr, region.size_bytes, _location(region.device))
            if status != 0:
                raise EngineError(f"Mooncake cannot register {region.size_bytes} bytes (status {status})")
            self._addresses.append(region.base_ptr)

    def descriptor(self) -> bytes:
        session = f"{self._host}:{self._engine.get_rpc_port()}"
        return msgspec.msgpack.encode(_Descriptor(session, self._scratch.ctypes.data, self._trial.region))

    def connect(self, incarnation: str, descriptor: bytes) -> MooncakePeer:
        try:
            known = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except msgspec.MsgspecError as error:
            raise EngineError(f"not a Mooncake descriptor: {error}") from None
        return MooncakePeer(known.session, known.scratch_ptr, known.trial)

    def disconnect(self, peer: MooncakePeer) -> None:
        """Do nothing: the engine drops broken connections by itself."""

    def post(self, peer: MooncakePeer, pieces: Pieces) -> MooncakeOp:
        op = MooncakeOp([], failed=False)
        submit = self._engine.transfer_submit_write
        for src, dst, length in zip(pieces.src.tolist(), pieces.dst.tolist(), pieces.lengths.tolist(), strict=True):
            number = submit(peer.session, src, dst, length)
            if number == 0:  # refused, nothing was started; what was submitted before runs to its end
                op.failed = True
                break
            op.ids.append(number)
        return op

    def probe(self, peer: MooncakePeer) -> MooncakeOp:
        return self.post(peer, Pieces.one(self._scratch.ctypes.data, peer.scratch_ptr, PROBE_BYTES))

    def trial(self, peer: MooncakePeer) -> tuple[MooncakeOp, int]:
        pieces = trial_pieces(self._trial.region, peer.trial, max_piece_bytes=self.caps.max_piece_bytes)
        return self.post(peer, pieces), pieces.size_bytes

    def fence(self, peer: MooncakePeer) -> MooncakeOp:
        """Fail: a failed piece may sit in the sockets of either side, and no later one goes behind it (there are four lanes)."""
        return MooncakeOp([], failed=True)

    def poll(self, op: MooncakeOp) -> OpState:
        """Poll up to the first pending piece: those behind it mostly end later."""
        # A poll of each piece every time cost the sender a tenth of its rate with small pages.
        check = self._engine.transfer_check_status
        num_final = 0
        for number in op.ids:
            status = check(number)
            if status in (PENDING, OVERDUE):
                break
            op.failed |= status != DONE
            num_final += 1
        del op.ids[:num_final]
        if op.ids:
            return OpState.PENDING
        return OpState.FAILED if op.failed else OpState.DONE

    def progress(self) -> None:
        """Do nothing: the engine has threads of its own."""

    def close(self) -> None:
        for address in self._addresses:
            self._engine.unregister_memory(address)
        self._addresses.clear()
        with quiet(1, 2):
            self._engine = None
        self._trial.close()


def _location(device: int | None) -> str:
    """Return Mooncake's name of where memory is; "*": let it find out."""
    return "*" if device is None else f"cuda:{device}"
