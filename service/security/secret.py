"""The secret that the members of a cluster share (`--cluster-secret-file`), its derived keys, signatures, and vouchers.

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
VOUCHERS = "vouchers"  # what keys are derived for

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


def sign(text: bytes, secret: bytes | None, *, purpose: str) -> str:
    """The value of a header that says that a member of the cluster wrote `text`; without a secret members check nothing."""
    return "-" if secret is None else hmac.new(derive(secret, purpose), text, hashlib.sha256).hexdigest()


def is_signed(signature: str, text: bytes, secret: bytes | None, *, purpose: str) -> bool:
    own = sign(text, secret, purpose=purpose)
    return secret is None or hmac.compare_digest(signature.encode(errors="replace"), own.encode())


def warn_if_others_read(path: str) -> None:
    if Path(path).stat().st_mode & 0o077:
        log.warning("%s may be read by other users of this machine; chmod 600 it", path)


def vouch(secret: bytes, *, host: str, port: int, rooms: Sequence[int]) -> str:
    """The header's value. `rooms`: all rooms of the request, in order."""
    return sign(_vouched_text(host, port, rooms), secret, purpose=VOUCHERS)


def is_vouched(voucher: str, secret: bytes, *, host: str, port: int, rooms: Sequence[int]) -> bool:
    return is_signed(voucher, _vouched_text(host, port, rooms), secret, purpose=VOUCHERS)


def _vouched_text(host: str, port: int, rooms: Sequence[int]) -> bytes:
    return "\n".join([host, str(port), *map(str, rooms)]).encode()
