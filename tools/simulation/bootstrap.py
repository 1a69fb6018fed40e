"""Bootstrap servers: the production registry behind its JSON protocol, and the production registrar's turns.

A call happens in one instant, at the end of its delay: what may be lost is the request, or the answer.
"""

import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bootstrap_server.client import BootstrapError, Registrar, _read, _refusal
from bootstrap_server.protocol import Registration, RegistrationReply, RoomBatch, RouteReply
from bootstrap_server.registry import Registry
from service.http.errors import ApiError
from service.http.routes import OPENAI
from tools.simulation.world import Process, Violation
from transfer_backends.contract import KVArgs, LookupFailed, Route
from transfer_backends.prefill.manager import PrefillManager
from transfer_backends.wire import PROTOCOL_VERSION

Find = Callable[[str], "SimBootstrap | None"]
Reach = Callable[[str], bool]


class SimBootstrap:
    """One life of a server, alone or inside a prefill worker. Routes as bootstrap_server/app.py has them."""

    def __init__(self, process: Process, registry: Registry) -> None:
        self.process = process
        self.registry = registry

    def request(self, method: str, target: str, body: bytes) -> tuple[int, bytes]:
        self.registry.expire(self.process.clock())
        try:
            reply = self._handle(method, target, body)
        except ApiError as error:
            return error.status, msgspec.json.encode(OPENAI.body(error))
        except msgspec.MsgspecError as error:
            return 400, msgspec.json.encode(OPENAI.body(ApiError(400, f"body: {error}")))
        try:
            self.registry.check()
        except AssertionError as error:
            raise Violation(f"{self.process.name}: {error}") from error
        return 200, msgspec.json.encode(reply)

    def _handle(self, method: str, target: str, body: bytes) -> Any:
        path, _, query = target.partition("?")
        asked = dict(urllib.parse.parse_qsl(query))
        match method, path:
            case "PUT", "/route":
                self.registry.register(msgspec.json.decode(body, type=Registration), self.process.clock())
                return RegistrationReply(self.registry.lease_s, self.registry.shared)
            case "GET", "/route":
                if "any" in asked:
                    return self.registry.look_up_any(int(asked["room"]), but=asked.get("but", "").split(","))
                return self.registry.look_up(int(asked["room"]))
            case "DELETE", "/route":
                self.registry.leave(asked.get("incarnation", ""))
                return {}
            case "POST", "/rooms":
                batch = msgspec.json.decode(body, type=RoomBatch)
                self.registry.register_rooms(batch.incarnation, batch.rooms, self.process.clock())
                return {}
        raise ApiError(404, f"{method} {path}")


def _call(find: Find, reach: Reach, server: str, method: str, target: str, body: bytes) -> bytes:
    there = find(server)
    if there is None or not there.process.alive or there.process.frozen or not reach(server):
        raise BootstrapError(f"bootstrap server {server} cannot be reached: simulated")
    status, answer = there.request(method, target, body)
    if status != 200:
        raise _refusal(server, status, answer)
    return answer


def look_up_in(there: SimBootstrap | None, server: str, room: int, *, but: Sequence[str] | None, reach: Reach) -> Route:
    """disagg/registration.py's look-up over the simulated network."""
    try:
        others = "" if but is None else "&any=1&but=" + urllib.parse.quote(",".join(but))
        body = _call(lambda _: there, reach, server, "GET", f"/route?room={room}{others}", b"")
    except BootstrapError as error:
        raise LookupFailed(str(error), permanent=error.permanent, of_room=error.of_room) from error
    reply = _read(server, body, RouteReply)
    return Route(control=reply.worker.control, incarnation=reply.worker.incarnation, shared=reply.shared)


class SimRegistrar(Registrar):
    """The production registrar without its thread."""

    def __init__(
        self,
        manager: PrefillManager,
        kv_args: KVArgs,
        *,
        server: str,
        find: Find,
        reach: Reach,
        clock: Callable[[], float],
    ) -> None:
        host, _, port = manager.control_address.rpartition(":")
        worker = Registration(
            incarnation=manager.incarnation,
            control_host=host,
            control_port=int(port),
            protocol_version=PROTOCOL_VERSION,
            page_size=kv_args.page_size,
            signature=kv_args.signature,
            dtype=kv_args.dtype,
        )
        super().__init__(server, worker, clock=clock)
        self._find, self._reach = find, reach

    def _request(self, method: str, path: str, value: Any) -> bytes:
        body = b"" if value is None else msgspec.json.encode(value)
        return _call(self._find, self._reach, self._server, method, path, body)
