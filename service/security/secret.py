"""The secret that the members of a cluster share (`--cluster-secret-file`), its derived keys, and vouchers.

With a voucher a router vouches for a bootstrap server and rooms: a decode worker may dial it.
"""

import hashlib
import hmac
import logging
from collections.abc import Sequence
from pathlib import Path

from service.flags import ConfigError

MIN_SECRET_BYTES = 16
VOUCHER_HEADER = "X-Cluster-Voucher"

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


def warn_if_others_read(path: str) -> None:
    if Path(path).stat().st_mode & 0o077:
        log.warning("%s may be read by other users of this machine; chmod 600 it", path)


def vouch(secret: bytes, *, host: str, port: int, rooms: Sequence[int]) -> str:
    """The header's value. `rooms`: all rooms of the request, in order."""
    text = "\n".join([host, str(port), *map(str, rooms)]).encode()
    return hmac.new(derive(secret, "vouchers"), text, hashlib.sha256).hexdigest()


def is_vouched(voucher: str, secret: bytes, *, host: str, port: int, rooms: Sequence[int]) -> bool:
    return hmac.compare_digest(
        voucher.encode(errors="replace"), vouch(secret, host=host, port=port, rooms=rooms).encode()
    )
