"""CURVE keys of the control plane, from the cluster secret.

Session keys and counters make recorded frames worthless. Prefill listens and admits decode's key
(ZAP, RFC 27).
"""

from typing import Any

import zmq
from zmq.utils import z85

from service.security.keys import derive

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_PREFILL, _DECODE = "control plane, prefill", "control plane, decode"


def guard_listener(sock: Any, secret: bytes) -> None:
    """Set prefill's keys, before `bind`."""
    sock.curve_server = True
    sock.curve_secretkey = z85.encode(derive(secret, _PREFILL))
    sock.setsockopt_string(zmq.ZAP_DOMAIN, "control")


def guard_connector(sock: Any, secret: bytes) -> None:
    """Set decode's keys, before `connect`."""
    own = z85.encode(derive(secret, _DECODE))
    sock.curve_secretkey, sock.curve_publickey = own, zmq.curve_public(own)
    sock.curve_serverkey = zmq.curve_public(z85.encode(derive(secret, _PREFILL)))


class ZapAuthenticator:
    """Admits decode's key. Create it before `bind`, call `answer` when readable."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", secret: bytes) -> None:
        self.socket: Any = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)
        self._known = z85.decode(zmq.curve_public(z85.encode(derive(secret, _DECODE))))

    def answer(self) -> None:
        """Reply to waiting requests without blocking."""
        while True:
            try:
                request: list[bytes] = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            version, number = (*request, b"", b"")[:2]
            good = len(request) == 7 and request[5] == b"CURVE" and request[6] == self._known
            status = [b"200", b"OK", b"decode"] if good else [b"400", b"not a member of this cluster", b""]
            self.socket.send_multipart([version, number, *status, b""])

    def close(self) -> None:
        self.socket.close(0)
