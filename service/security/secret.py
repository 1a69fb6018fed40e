"""The cluster secret (`--cluster-secret-file`): keys, signatures, vouchers.

A voucher permits decode to contact a bootstrap server for given rooms.
"""

import hashlib
import hmac
import logging
import os
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
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


# ---- signed HTTP calls

AUTH_HEADER = "X-Cluster-Auth"
CHALLENGE_HEADER = "X-Cluster-Challenge"
PERIOD_S = 60.0
MAX_NONCES = 1 << 18  # in two periods; only members add one
NONCE_BYTES = 16
MAX_PART_CHARS = 128


@dataclass(frozen=True, slots=True)
class Call:
    """A call's signed parts; `path` with query."""

    method: str
    path: str
    body: bytes


class Verdict(Enum):
    """Result of a verification. STALE: a member's old or missing challenge."""

    GOOD = "good"
    STALE = "stale"
    FORGED = "forged"


class Verifier:
    """The server's side, of one start.

    Signed HTTP calls in a cluster: replay-safe, without synchronized clocks.

        call without or with an old challenge  -> 401 and `X-Cluster-Challenge: C`
        call with `X-Cluster-Auth: C:N:MAC`    -> served; the answer carries `X-Cluster-Auth: MAC`

    Challenge C changes every `PERIOD_S` and at each start; the last two are valid. Nonce N is
    accepted once. A call's MAC covers C, N, method, path with query, body; an answer's N, status,
    body.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = derive(secret, "http calls")
        self._start_key = secrets.token_bytes(32)  # a restart invalidates recorded calls
        self._seen: OrderedDict[str, int] = OrderedDict()  # nonce -> period, oldest first

    def challenge(self, now_s: float) -> str:
        return self._challenge_of(int(now_s // PERIOD_S))

    def verify(self, header: str, call: Call, now_s: float) -> tuple[Verdict, str]:
        """Return verdict and the answer's nonce. A repeated call is FORGED."""
        parts = header.split(":")
        if len(parts) != 3 or not all(len(part) <= MAX_PART_CHARS and part.isascii() for part in parts):
            return Verdict.FORGED, ""
        challenge, nonce, mac = parts
        if not hmac.compare_digest(mac.encode(), _mac(self._key, challenge, nonce, call).encode()):
            return Verdict.FORGED, ""
        period = int(now_s // PERIOD_S)
        made = next((p for p in (period, period - 1) if hmac.compare_digest(challenge, self._challenge_of(p))), None)
        if made is None:
            return Verdict.STALE, ""
        if nonce in self._seen:
            return Verdict.FORGED, ""
        self._remember(nonce, made, period)
        return Verdict.GOOD, nonce

    def sign_answer(self, nonce: str, *, status: int, body: bytes) -> str:
        return _answer_mac(self._key, nonce, status=status, body=body)

    def _challenge_of(self, period: int) -> str:
        return hmac.new(self._start_key, str(period).encode(), hashlib.sha256).hexdigest()[:32]

    def _remember(self, nonce: str, made: int, period: int) -> None:
        self._seen[nonce] = made
        while self._seen and next(iter(self._seen.values())) < period - 1:
            self._seen.popitem(last=False)  # with an expired challenge
        assert len(self._seen) <= MAX_NONCES, "more signed calls in two minutes than a cluster can make"


@dataclass(slots=True)
class Signer:
    """The caller's side. After a 401 set its challenge and repeat."""

    secret: bytes = field(repr=False)
    challenge: str = ""

    def sign(self, call: Call) -> tuple[str, str]:
        nonce = secrets.token_hex(NONCE_BYTES)
        return f"{self.challenge}:{nonce}:{_mac(derive(self.secret, 'http calls'), self.challenge, nonce, call)}", nonce

    def is_answer(self, header: str, nonce: str, *, status: int, body: bytes) -> bool:
        """Return whether the server signed this answer."""
        expected = _answer_mac(derive(self.secret, "http calls"), nonce, status=status, body=body)
        return hmac.compare_digest(header.encode(errors="replace"), expected.encode())


def _mac(key: bytes, challenge: str, nonce: str, call: Call) -> str:
    body = hashlib.sha256(call.body).hexdigest()
    return _sign(key, "call", challenge, nonce, call.method, call.path, body)


def _answer_mac(key: bytes, nonce: str, *, status: int, body: bytes) -> str:
    return _sign(key, "answer", nonce, str(status), hashlib.sha256(body).hexdigest())


def _sign(key: bytes, *parts: str) -> str:
    return hmac.new(key, "\n".join(parts).encode(errors="surrogateescape"), hashlib.sha256).hexdigest()
