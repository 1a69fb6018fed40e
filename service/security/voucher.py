"""A router with the cluster's secret vouches for a bootstrap server and rooms: a decode worker may dial it."""

import hashlib
import hmac
from collections.abc import Sequence

from service.security.secret import derive

VOUCHER_HEADER = "X-Cluster-Voucher"


def vouch(secret: bytes, *, host: str, port: int, rooms: Sequence[int]) -> str:
    """The header's value. `rooms`: all rooms of the request, in order."""
    text = "\n".join([host, str(port), *map(str, rooms)]).encode()
    return hmac.new(derive(secret, "vouchers"), text, hashlib.sha256).hexdigest()


def is_vouched(voucher: str, secret: bytes, *, host: str, port: int, rooms: Sequence[int]) -> bool:
    return hmac.compare_digest(
        voucher.encode(errors="replace"), vouch(secret, host=host, port=port, rooms=rooms).encode()
    )
