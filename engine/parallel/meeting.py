"""How rank i of one machine finds rank i of another: one listens, one dials, and each proves that it knows the cluster's secret.

    both -> 32 random bytes                       both -> HMAC(secret, side, own bytes, the other's, what the group is)

Only the meeting is proven: the bytes that follow are plain, as KV is. A stranger costs the listener at most `PROOF_S`.
"""

import hashlib
import hmac
import secrets
import socket
import time

from service.security.secret import derive

NONCE_BYTES = 32
PROOF_S = 5.0
RETRY_S = 0.05


class MeetingError(Exception):
    """The other rank did not come in time; the message names the address."""


def listen(server: socket.socket, *, secret: bytes, group: str, within_s: float) -> socket.socket:
    """The connection of the one rank that knows the secret and names the same `group` (job, sizes, this rank)."""
    deadline_s = time.monotonic() + within_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        server.settimeout(left_s)
        try:
            connection, _ = server.accept()
        except TimeoutError:
            break
        if _is_proven(connection, secret, group, side=b"listener", other=b"dialer"):
            return connection
        connection.close()
    raise MeetingError(f"no rank of {group} came to {_name(server.getsockname())} within {within_s:.0f} s")


def dial(host: str, port: int, *, secret: bytes, group: str, within_s: float) -> socket.socket:
    """The connection to the rank that listens, or will soon."""
    deadline_s = time.monotonic() + within_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((host, port), timeout=left_s)
        except OSError:
            time.sleep(min(RETRY_S, left_s))
            continue
        if _is_proven(connection, secret, group, side=b"dialer", other=b"listener"):
            return connection
        connection.close()
        time.sleep(min(RETRY_S, left_s))
    raise MeetingError(f"no rank of {group} answered at {_name((host, port))} within {within_s:.0f} s")


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
    return hmac.compare_digest(proof, _proof(secret, other, theirs, own, group))


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
