"""Bootstrap host, port and room of disaggregated requests, and allowed hosts. Pure."""

from collections.abc import Callable, Sequence
from typing import Any

from engine.messages import FAKE_BOOTSTRAP_HOST, Bootstrap
from service.http.body import Body, optional
from service.http.errors import bad_field
from service.security.browser import AllowedAddresses
from service.security.keys import is_vouched

Host = str | list[str | None] | None
Port = int | list[int | None] | None
Room = int | list[int | None] | None

MAX_ROOM = 2**63


class BootstrapFields(Body):
    """One value, or one per sample or prompt."""

    bootstrap_host: Host = optional(
        "Host of the prefill worker's bootstrap server, one or one per prompt (SGLang). The router sets it.", "10.0.0.1"
    )
    bootstrap_port: Port = optional(
        "Port of the bootstrap server, 1 to 65535, one or one per prompt (SGLang). The router sets it.", 8998
    )
    bootstrap_room: Room = optional(
        "Number that pairs the prefill and decode halves of a request, 1 to 2**63 - 1 (SGLang). One number counts up "
        "over samples; a list gives one per prompt. The router sets it.",
        4711,
    )


def build_bootstraps(
    fields: BootstrapFields, *, mode: str, num_prompts: int, n: int, default_port: int, mint_room: Callable[[], int]
) -> list[Bootstrap | None]:
    """One per sample, prompt-major; None: this worker serves it whole. Raises ApiError(400).

    A single room counts up over all samples, a room per prompt within the prompt.
    """
    total = num_prompts * n
    if mode == "null" or (fields.bootstrap_host, fields.bootstrap_port, fields.bootstrap_room) == (None, None, None):
        return [None] * total
    hosts = _spread("bootstrap_host", fields.bootstrap_host, num_prompts=num_prompts, n=n)
    ports = _spread("bootstrap_port", fields.bootstrap_port, num_prompts=num_prompts, n=n)
    rooms = _spread_rooms(fields.bootstrap_room, num_prompts=num_prompts, n=n)
    return [
        _bootstrap(host, port if port is not None else default_port, room, mode=mode, mint_room=mint_room)
        for host, port, room in zip(hosts, ports, rooms, strict=True)
    ]


def _bootstrap(host: str | None, port: int, room: int | None, *, mode: str, mint_room: Callable[[], int]) -> Bootstrap:
    if host == FAKE_BOOTSTRAP_HOST:
        return Bootstrap(host=host, port=max(port, 0), room=room or mint_room())
    if room is None:
        raise bad_field(
            "bootstrap_room",
            "is missing: it pairs the halves that a router sends to two workers; leave bootstrap_host and bootstrap_port out, too, "
            f"and this {mode} worker serves the request whole",
        )
    if not host and mode == "decode":
        raise bad_field("bootstrap_host", "is missing: a decode worker must know its prefill worker's bootstrap server")
    if not 0 < port < 65536:
        raise bad_field("bootstrap_port", f"must be between 1 and 65535, got {port}")
    if not 0 < room < MAX_ROOM:
        raise bad_field("bootstrap_room", f"must be between 1 and 2**63 - 1, got {room}")
    return Bootstrap(host=host or "", port=port, room=room)


def _spread(field: str, value: Any, *, num_prompts: int, n: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * (num_prompts * n)
    if len(value) == num_prompts * n:
        return value
    if len(value) == num_prompts:
        return [v for v in value for _ in range(n)]
    raise bad_field(field, f"has {len(value)} entries for {num_prompts} prompts with {n} samples each")


def _spread_rooms(value: Any, *, num_prompts: int, n: int) -> list[int | None]:
    total = num_prompts * n
    if isinstance(value, int):
        return [value + i for i in range(total)]
    rooms = _spread("bootstrap_room", value, num_prompts=num_prompts, n=n)
    if isinstance(value, list) and len(value) != total:
        return [None if room is None else room + i % n for i, room in enumerate(rooms)]
    return rooms


class BootstrapAllowlist:
    """Allowed addresses, plus those signed by a router; without any the worker dials none.

    `dials_servers`: false for a prefill worker, which dials only workers.
    """

    def __init__(
        self, allowed: AllowedAddresses | None = None, *, secret: bytes | None = None, dials_servers: bool = True
    ) -> None:
        self._allowed = allowed
        self._secret = secret
        self._dials_servers = dials_servers

    def check_source(self, control: str) -> None:
        """Check "host:port" of a signed KV source. Raises ApiError(400)."""
        if not self.admits(control):
            why = "this worker gets KV of no other" if self._allowed is None else "it is no HOST:PORT"
            raise bad_field("resume", f"names {control[:100]!r} as the place of the KV: {why}")

    def admits(self, control: str) -> bool:
        """True if this worker dials others and `control` is "host:port"."""
        host, _, port = control.rpartition(":")
        has_shape = bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536
        return self._allowed is not None and has_shape

    def check(self, bootstraps: Sequence[Bootstrap | None], *, voucher: str) -> None:
        """Raises ApiError(400) that names bootstrap_host."""
        if self._allowed is None or not self._dials_servers:
            return
        named = [b for b in bootstraps if b is not None and b.host != FAKE_BOOTSTRAP_HOST]
        rooms = [b.room for b in named]
        for host, port in sorted({(b.host, b.port) for b in named}):
            if self._allowed.admits(host, port):
                continue
            if voucher and self._secret and is_vouched(voucher, self._secret, host=host, port=port, rooms=rooms):
                continue
            raise bad_field(
                "bootstrap_host",
                f"{f'{host[:100]}:{port}'!r} is not a bootstrap server that this worker knows "
                "(--disaggregation-bootstrap-allowed, or a router with the same --cluster-secret-file)",
                code="unknown_bootstrap_server",
            )
