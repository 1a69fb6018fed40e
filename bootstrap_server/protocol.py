"""Messages between a bootstrap server and its clients: JSON bodies, decoded strictly.

    PUT    /route           Registration -> RegistrationReply   a prefill worker registers, renews, or replaces itself
    GET    /route?room=N    -> RouteReply                 a decode worker looks up the worker of room N
           &any=1&but=I,J   -> RouteReply                 ... or, if that one is gone, any other than I and J
    DELETE /route?incarnation=I                           a prefill worker leaves
    POST   /rooms           RoomBatch -> {}               a prefill worker owns these rooms (shared servers only)
    GET    /health          -> {}
    any error: 4xx or 503 with ErrorReply
    With a cluster secret all but /health is signed, both ways (service/security/signing.py).

A request names the bootstrap server. The one inside a prefill worker leads every room to that worker: to its DP rank `room mod
dp_size`. Decode caches the answer of each rank. A server on its own is *shared*: the worker that gets a request registers its room (batched, remembered for
`room_ttl_s`), and decode retries a 404 until its handshake times out. After a restart its replies have a new `server` id, and
workers register their latest rooms again. SGLang has the same for data-parallel ranks (`/register_dp_rank`).
"""

from typing import Annotated

import msgspec

MAX_BODY_BYTES = 1 << 20
MAX_ROOMS_A_BATCH = 4096
MAX_BUT = 64  # incarnations in one look-up
MAX_RANKS = 64  # of a worker

Room = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=2048)]


class Registration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One start of a prefill worker, or of one of its `dp_size` ranks. `control_host:control_port`: its control plane. `url`:
    its HTTP address, if any.
    """

    incarnation: Name
    control_host: Name
    control_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    protocol_version: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    page_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    signature: Text
    dtype: Name
    url: Text = ""
    role: str = "prefill"
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
    """Renew well before `lease_s` seconds. `shared`: register rooms, too. `server`: a new id after each start of the server."""

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
    """Written by service/http/errors.py."""

    error: ErrorDetail
