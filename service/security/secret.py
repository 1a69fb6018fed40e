"""The cluster secret (`--cluster-secret-file`): keys, signatures, vouchers.

A voucher permits decode to contact a bootstrap server for given rooms.
"""

import hashlib
import hmac
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from service.flags import ConfigError

MIN_SECRET_BYTES = 16
VOUCHER_HEADER = "X-Cluster-Voucher"
VOUCHERS = "vouchers"  # purpose of the derived key
ROUTER_SECRET = "TANDEM_ROUTER_SECRET"  # environment variable shared by router and workers without a file

log = logging.getLogger(__name__)


def read_secret_file(path: str) -> bytes:
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--cluster-secret-file: cannot read {path}: {error.strerror}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"--cluster-secret-file: {path} holds {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed"
        )
    warn_if_others_read(path)
    return secret


def derive(secret: bytes, purpose: str) -> bytes:
    return hmac.digest(secret, b"tandem: " + purpose.encode(), hashlib.sha256)


def router_secret(cluster: bytes | None) -> bytes | None:
    """Return the secret that identifies routers: the cluster's, or `tandem up`'s.

    Without it workers obey no router. Raises ConfigError if short.
    """
    given = os.environ.get(ROUTER_SECRET, "").strip().encode()
    if cluster is None and 0 < len(given) < MIN_SECRET_BYTES:
        raise ConfigError(f"{ROUTER_SECRET}: holds {len(given)} bytes, at least {MIN_SECRET_BYTES} are needed")
    return cluster or given or None


def sign(text: bytes, secret: bytes, *, purpose: str) -> str:
    """Sign `text` as a member."""
    return hmac.new(derive(secret, purpose), text, hashlib.sha256).hexdigest()


def is_signed(signature: str, text: bytes, secret: bytes | None, *, purpose: str) -> bool:
    """Verify a signature; False without secret."""
    if secret is None:
        return False
    own = sign(text, secret, purpose=purpose)
    return hmac.compare_digest(signature.encode(errors="replace"), own.encode())


def warn_if_others_read(path: str) -> None:
    if Path(path).stat().st_mode & 0o077:
        log.warning("%s may be read by other users of this machine; chmod 600 it", path)


def vouch(secret: bytes, *, host: str, port: int, rooms: Sequence[int]) -> str:
    """Return a voucher for a request's rooms."""
    return sign(_vouched_text(host, port, rooms), secret, purpose=VOUCHERS)


def is_vouched(voucher: str, secret: bytes, *, host: str, port: int, rooms: Sequence[int]) -> bool:
    return is_signed(voucher, _vouched_text(host, port, rooms), secret, purpose=VOUCHERS)


def _vouched_text(host: str, port: int, rooms: Sequence[int]) -> bytes:
    return "\n".join([host, str(port), *map(str, rooms)]).encode()
