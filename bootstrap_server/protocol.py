"""JSON messages between a bootstrap server and its clients.

    PUT    /route           Registration -> RegistrationReply   a prefill worker registers or renews
    GET    /route?room=N    -> RouteReply                 look up the worker of room N
           &any=1&but=I,J   -> RouteReply                 ... or any other than I and J
    DELETE /route?incarnation=I                           a prefill worker leaves
    POST   /rooms           RoomBatch -> {}               rooms of a worker (shared servers only)
    GET    /health          -> {}
    any error: 4xx or 503 with ErrorReply
    With a cluster secret all but /health is signed, both ways (service/security/keys.py).

Inside a prefill worker, rooms map to DP ranks: `room mod dp_size`, as SGLang's `/register_dp_rank`.
On a *shared* server workers register rooms (batched, for `room_ttl_s`), and decode retries a 404
until its handshake timeout. A restart changes `server`; then workers register recent rooms again.
"""

from typing import Annotated

import msgspec

MAX_BODY_BYTES = 1 << 20
MAX_ROOMS_A_BATCH = 4096
MAX_BUT = 64  # incarnations per look-up
MAX_RANKS = 64  # per worker

Room = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=2048)]


class Registration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A start of a prefill worker, or one of its DP ranks."""

    incarnation: Name
    control_host: Name
    control_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    protocol_version: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    page_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    signature: Text
    dtype: Name
    dp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    dp_rank: Annotated[int, msgspec.Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        if self.dp_rank >= self.dp_size:
            raise ValueError(f"dp_rank: must be below dp_size {self.dp_size}, got {self.dp_rank}")

    @property
    def control(self) -> str:
        host = f"[{self.control_host}]" if ":" in self.control_host else self.control_host
        return f"{host}:{self.control_port}"


class RegistrationReply(msgspec.Struct, frozen=True):
    """Renew well before `lease_s`; register rooms if `shared`. `server` changes at each start."""

    lease_s: float
    shared: bool
    server: str = ""


class RouteReply(msgspec.Struct, frozen=True):
    worker: Registration
    shared: bool


class RoomBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    incarnation: Name
    rooms: Annotated[list[Room], msgspec.Meta(max_length=MAX_ROOMS_A_BATCH)]


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    param: str | None = None


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorDetail
