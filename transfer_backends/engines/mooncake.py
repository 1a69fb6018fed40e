"""Mooncake transfer engine over TCP. RDMA and NVLink have never been run.

Measured:

- Batch calls report completion while writes land, so pieces are submitted and checked singly. DONE
  is exact; a FAILED piece may land later (seen 0.6 s after a network recovered).
- Ids are raw pointers: never polled after their end.
- Queues stall for ever on overflow: settings raise them, `caps.max_inflight` stays far below.
- Sync calls spin on a core: never used.
"""

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from transfer_backends.contract import TCP_RESEND_S, BackendUnavailable, Caps, EngineError, OpState, Pieces, Region
from transfer_backends.engines.cuda_context import CudaContext
from transfer_backends.engines.environment import devices_here, named_devices, quiet, set_defaults
from transfer_backends.engines.mooncake_protocols import NEEDS_FABRIC, Machine, choose, of_gpu, settings
from transfer_backends.engines.trial_memory import FabricMemory, TrialMemory, trial_pieces
from transfer_backends.engines.wheels import MOONCAKE, installed_torch, torch_cuda_major, wheel_of
from transfer_backends.transports import NVLINK

SETTINGS = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "600000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TRANSFER_TIMEOUT": "30",
    "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "2",
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_SLICE_SIZE": str(2 << 20),  # GPU memory: one blocking cudaMemcpy per slice; no effect on host memory
}
PROBE_BYTES = 8
PENDING, DONE, FAILED, OVERDUE = 0, 1, -1, -2  # of transfer_check_status; OVERDUE is still pending


class MooncakePeer(msgspec.Struct, frozen=True, array_like=True):
    session: str
    trial: Region


@dataclass(eq=False)
class MooncakeOp:
    """`ids`: submitted and not known to be final; `failed`: a piece was refused or failed."""

    ids: list[int]
    failed: bool


def import_mooncake(module: str = "mooncake.engine") -> Any:
    """Raises BackendUnavailable."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        torch = installed_torch()  # a wheel for another CUDA cannot be imported
        providers = "" if torch_cuda_major(torch) is None else " ibverbs-providers"
        raise BackendUnavailable(
            "mooncake: its library cannot be imported; install it with: "
            f"pip install {wheel_of(MOONCAKE, torch)} (for torch {torch}) and "
            f"apt-get install libibverbs1 libnuma1 libcurl4{providers} ({error})"
        ) from None


def protocol_here(asked: str, *, device: int | None) -> str:
    """Raises BackendUnavailable."""
    set_defaults(SETTINGS)
    module = import_mooncake()
    machine = Machine(
        has_hca="MC_FORCE_HCA" in os.environ or bool(devices_here()),
        on_gpu=device is not None,
        built_in=lambda name: bool(getattr(module, name, False)),
        has_fabric=lambda: device is not None and FabricMemory(CudaContext(device)).is_there(),
    )
    return choose(asked, os.environ, machine)


class MooncakeEngine:
    def __init__(
        self, *, host: str, device: int | None = None, protocol: str = "auto", ib_device: str | None = None
    ) -> None:
        """`host`: our address for peers; `device`: the pages' GPU."""
        devices = named_devices(ib_device, here=devices_here())
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
        taken = protocol_here(protocol, device=device)
        set_defaults(settings(taken, asked=protocol))
        if taken.startswith("nvlink"):
            self.caps = _of_nvlink(self.caps, taken)
        module = import_mooncake()
        self._host = host
        self._context = None if device is None else CudaContext(device)
        fabric = FabricMemory(self._context) if self._context is not None and taken == NEEDS_FABRIC else None
        self._trial = TrialMemory(device, fabric or self._context)
        self._addresses: list[int] = []
        self._mapped: dict[str, str] = {}  # incarnation by session, of every peer so far
        with quiet(1, 2):
            self._engine: Any = module.TransferEngine()
            status = self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ",".join(devices))
        if status != 0:
            raise BackendUnavailable(
                f"transfer backend mooncake: the engine cannot start on {host} (status {status}); is the address this machine's?"
            )

    def register(self, regions: Sequence[Region]) -> None:
        self._enter()
        for region in (*regions, self._trial.region):
            location = "*" if region.device is None else f"cuda:{region.device}"
            status = self._engine.register_memory(region.base_ptr, region.size_bytes, location)
            if status != 0:
                raise EngineError(f"Mooncake cannot register {region.size_bytes} bytes (status {status})")
            self._addresses.append(region.base_ptr)

    def descriptor(self) -> bytes:
        session = f"{self._host}:{self._engine.get_rpc_port()}"
        return msgspec.msgpack.encode(MooncakePeer(session, self._trial.region))

    def _enter(self) -> None:
        if self._context is not None:
            self._context.enter()

    def connect(self, incarnation: str, descriptor: bytes) -> MooncakePeer:
        try:
            peer = msgspec.msgpack.decode(descriptor, type=MooncakePeer)
        except msgspec.MsgspecError as error:
            raise EngineError(f"not a Mooncake descriptor: {error}") from None
        # Over NVLink the engine maps memory by session and address and never unmaps it: a
        # successor's bytes would land in the dead worker's memory.
        if not self.caps.carries_host_memory and self._mapped.setdefault(peer.session, incarnation) != incarnation:
            raise EngineError(
                f"{peer.session} was an earlier worker's, whose memory is still mapped; start this worker again"
            )
        return peer

    def disconnect(self, peer: MooncakePeer) -> None:
        """Broken connections are dropped, NVLink mappings never."""

    def post(self, peer: MooncakePeer, pieces: Pieces) -> MooncakeOp:
        self._enter()
        op = MooncakeOp([], failed=False)
        submit = self._engine.transfer_submit_write
        for src, dst, length in zip(pieces.src.tolist(), pieces.dst.tolist(), pieces.lengths.tolist(), strict=True):
            number = submit(peer.session, src, dst, length)
            if number == 0:  # refused, nothing started; pieces submitted before run to their end
                op.failed = True
                break
            op.ids.append(number)
        return op

    def probe(self, peer: MooncakePeer) -> MooncakeOp:
        return self.post(peer, Pieces.one(self._trial.region.base_ptr, peer.trial.base_ptr, PROBE_BYTES))

    def trial(self, peer: MooncakePeer) -> tuple[MooncakeOp, int]:
        pieces = trial_pieces(self._trial.region, peer.trial, max_piece_bytes=self.caps.max_piece_bytes)
        return self.post(peer, pieces), pieces.size_bytes

    def fence(self, peer: MooncakePeer) -> MooncakeOp:
        """It fails: no later write follows a piece stuck in a socket (there are four)."""
        return MooncakeOp([], failed=True)

    def poll(self, op: MooncakeOp) -> OpState:
        """Poll up to the first pending piece; later ones mostly end later."""
        # Polling every piece each time cost the sender 10 % of its rate with small pages.
        self._enter()
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

    def progress(self, *, eager: bool = False) -> None:
        """The engine has threads of its own."""

    def close(self) -> None:
        self._enter()
        for address in self._addresses:
            self._engine.unregister_memory(address)
        self._addresses.clear()
        with quiet(1, 2):
            self._engine = None
        self._trial.close()


def _of_nvlink(caps: Caps, protocol: str) -> Caps:
    """Limits without network delay; the name has the transport, which both sides need."""
    name = f"{caps.name}_{protocol}"
    return replace(of_gpu(caps, inside_machine=NVLINK), name=name, resend_s=0.0, carries_host_memory=False)
