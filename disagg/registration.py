"""Between managers and the bootstrap server: prefill registers itself, decode looks prefill up."""

from collections.abc import Sequence

from bootstrap_server.client import BootstrapError, Registrar, look_up
from bootstrap_server.protocol import Registration
from transfer_backends.contract import KVArgs, Lookup, LookupAny, LookupFailed, Route
from transfer_backends.prefill_manager import PrefillManager
from transfer_backends.wire import PROTOCOL_VERSION


def registrar_of(manager: PrefillManager, kv_args: KVArgs, *, server: str, secret: bytes | None) -> Registrar:
    """Keeps `manager` registered at the bootstrap server "host:port" from a thread of its own."""
    host, _, port = manager.control_address.rpartition(":")
    worker = Registration(
        incarnation=manager.incarnation,
        control_host=host.strip("[]"),
        control_port=int(port),
        protocol_version=PROTOCOL_VERSION,
        page_size=kv_args.page_size,
        signature=kv_args.signature,
        dtype=kv_args.dtype,
    )
    return Registrar(server, worker, secret=secret)


def look_up_with(secret: bytes | None) -> Lookup:
    """What the decode manager calls, off the loop, to find the prefill worker of a room."""
    return lambda bootstrap, room: _route(bootstrap, room, any_but=None, secret=secret)


def look_up_any_with(secret: bytes | None) -> LookupAny:
    """The same for a room that any prefill worker may serve."""
    return lambda bootstrap, room, but: _route(bootstrap, room, any_but=but, secret=secret)


def _route(bootstrap: str, room: int, *, any_but: Sequence[str] | None, secret: bytes | None) -> Route:
    try:
        reply = look_up(bootstrap, room, any_but=any_but, secret=secret)
    except BootstrapError as error:
        raise LookupFailed(str(error), permanent=error.permanent) from error
    return Route(control=reply.worker.control, incarnation=reply.worker.incarnation, shared=reply.shared)
