"""Bootstrap servers: the production registry behind its JSON protocol, and the way to it.

A call happens in one instant, at the end of its delay: what may be lost is the request, or the answer.
"""

import urllib.parse
from collections.abc import Callable
from typing import Any

import msgspec

from bootstrap_server.client import BootstrapError, Registrar, Send
from bootstrap_server.protocol import Registration, RegistrationReply, RoomBatch
from bootstrap_server.registry import BootstrapConfig, Registry
from disagg.registration import registration_of
from service.http.errors import ApiError
from service.http.routes import OPENAI
from service.security.keys import Call
from tools.simulation.world import Flag, Process, Threads
from transfer_backends.contract import KVArgs
from transfer_backends.prefill.manager import PrefillManager

Find = Callable[[str], "SimBootstrap | None"]
Reach = Callable[[str], bool]


class SimBootstrap:
    """One life of a server, alone or inside a prefill worker. Routes as bootstrap_server/app.py has them."""

    def __init__(self, process: Process, *, shared: bool) -> None:
        self.process = process
        self.registry = Registry(BootstrapConfig(lease_s=3.0, room_ttl_s=20.0), shared=shared)

    def request(self, method: str, target: str, body: bytes) -> tuple[int, bytes]:
        self.registry.expire(self.process.clock())
        try:
            reply = self._handle(method, target, body)
        except ApiError as error:
            return error.status, msgspec.json.encode(OPENAI.body(error))
        except msgspec.MsgspecError as error:
            return 400, msgspec.json.encode(OPENAI.body(ApiError(400, f"body: {error}")))
        self.process.hold(self.registry.check)
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


def send_over(find: Find, reach: Reach) -> Send:
    """What `over_http` of bootstrap_server/client.py is with sockets."""

    def send(server: str, call: Call, **_: object) -> tuple[int, bytes]:
        there = find(server)
        if there is None or not there.process.alive or there.process.frozen or not reach(server):
            raise BootstrapError(f"bootstrap server {server} cannot be reached: simulated")
        return there.request(call.method, call.path, call.body)

    return send


def start_registrar(
    server: str, manager: PrefillManager, kv_args: KVArgs, *, process: Process, threads: Threads, send: Send
) -> Registrar:
    """The production registrar, whose turns are one of `threads`."""
    registrar = Registrar(server, registration_of(manager, kv_args), clock=process.clock, send=send)
    thread = threads.add("registrar", registrar.turn)
    registrar._wake = Flag(thread.wake)  # type: ignore[assignment]
    thread.wake()
    return registrar
