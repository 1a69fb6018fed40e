"""Which bootstrap servers a request may name: a decode worker dials no unknown one. Pure."""

from collections.abc import Sequence

from engine.messages import FAKE_BOOTSTRAP_HOST, Bootstrap
from service.http.errors import bad_field
from service.security.addresses import AllowedAddresses
from service.security.voucher import is_vouched


class BootstrapAllowlist:
    """Known addresses, and those for which a router with the cluster's secret vouches. `allowed` None: none is dialled here."""

    def __init__(self, allowed: AllowedAddresses | None = None, *, secret: bytes | None = None) -> None:
        self._allowed = allowed
        self._secret = secret

    def check(self, bootstraps: Sequence[Bootstrap | None], *, voucher: str) -> None:
        """Check the samples of one request, in order. Raises ApiError(400) that names bootstrap_host."""
        if self._allowed is None:
            return
        named = [b for b in bootstraps if b is not None and b.host != FAKE_BOOTSTRAP_HOST]
        rooms = [b.room for b in named]
        for host, port in sorted({(b.host, b.port) for b in named}):
            if not self._allowed.admits(host, port) and not self._is_vouched(voucher, host, port, rooms):
                shown = f"{host[:100]}:{port}"
                raise bad_field(
                    "bootstrap_host",
                    f"{shown!r} is not a bootstrap server that this worker knows (--disaggregation-bootstrap-allowed, or a "
                    "router with the same --cluster-secret-file)",
                    code="unknown_bootstrap_server",
                )

    def _is_vouched(self, voucher: str, host: str, port: int, rooms: Sequence[int]) -> bool:
        if self._secret is None or not voucher:
            return False
        return is_vouched(voucher, self._secret, host=host, port=port, rooms=rooms)
