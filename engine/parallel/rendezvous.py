"""Rendezvous of two ranks on different machines with mutual proof of the cluster secret.

  both -> 32 random bytes
  both -> HMAC(secret, side, own bytes, the other's, name of the group)

Later bytes are plain, like KV. A stranger delays the listener by at most `PROOF_S`.
"""

import hashlib
import hmac
import secrets
import socket
import time

from service.security.keys import derive

NONCE_BYTES = 32
PROOF_S = 5.0
RETRY_S = 0.05
LOST_S = 15  # after which a dead machine is gone; the kernel tests it
ASK_S = 3


class RendezvousError(Exception):
    """The other rank did not come in time; has the address."""


def listen(server: socket.socket, *, secret: bytes, group: str, within_s: float) -> socket.socket:
    """Accept the rank with the same secret and `group` (job, sizes, rank)."""
    deadline_s, refused = time.monotonic() + within_s, 0
    while (left_s := deadline_s - time.monotonic()) > 0:
        server.settimeout(left_s)
        try:
            connection, _ = server.accept()
        except TimeoutError:
            break
        if _is_proven(connection, secret, group, side=b"listener", other=b"dialer"):
            return connection
        connection.close()
        refused += 1
    strangers = f"; of {refused} that came none proved the cluster's secret (--cluster-secret-file)" if refused else ""
    raise RendezvousError(
        f"no rank of {group} came to {_name(server.getsockname())} within {within_s:.0f} s{strangers}"
    )


def dial(host: str, port: int, *, secret: bytes, group: str, within_s: float) -> socket.socket:
    deadline_s, refused = time.monotonic() + within_s, False
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((host, port), timeout=left_s)
        except OSError:
            time.sleep(min(RETRY_S, left_s))
            continue
        if _is_proven(connection, secret, group, side=b"dialer", other=b"listener"):
            return connection
        connection.close()
        refused = True
        time.sleep(min(RETRY_S, left_s))
    stranger = "; what listens there did not prove the cluster's secret (--cluster-secret-file)" if refused else ""
    raise RendezvousError(f"no rank of {group} answered at {_name((host, port))} within {within_s:.0f} s{stranger}")


def _is_proven(connection: socket.socket, secret: bytes, group: str, *, side: bytes, other: bytes) -> bool:
    connection.settimeout(PROOF_S)
    own = secrets.token_bytes(NONCE_BYTES)
    try:
        connection.sendall(own)
        theirs = _exactly(connection, NONCE_BYTES)
        connection.sendall(_proof(secret, side, own, theirs, group))
        proof = _exactly(connection, hashlib.sha256().digest_size)
    except OSError:
        return False
    if not hmac.compare_digest(proof, _proof(secret, other, theirs, own, group)):
        return False
    _end_with_its_machine(connection)
    return True


def _end_with_its_machine(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_S // ASK_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)


def _proof(secret: bytes, side: bytes, own: bytes, theirs: bytes, group: str) -> bytes:
    return hmac.digest(derive(secret, "ranks"), b"\n".join([side, own, theirs, group.encode()]), hashlib.sha256)


def _exactly(connection: socket.socket, size: int) -> bytes:
    deadline_s, found = time.monotonic() + PROOF_S, b""
    while len(found) < size:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionResetError
        found += part
    return found


def _name(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
