"""API keys from a flag and a reloaded file, and their rights; the cluster secret.

Keys are compared by digest, all of them, in constant time.
"""

import hashlib
import hmac
import logging
import os
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path

import msgspec

from service.flags import ConfigError

# ---- The cluster secret (`--cluster-secret-file`): keys, signatures, vouchers.
#
# A voucher permits decode to contact a bootstrap server for given rooms.

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
    """The secret that identifies routers: the cluster's, or `tandem up`'s.

    Without it workers obey no router. Raises ConfigError if short.
    """
    given = os.environ.get(ROUTER_SECRET, "").strip().encode()
    if cluster is None and 0 < len(given) < MIN_SECRET_BYTES:
        raise ConfigError(f"{ROUTER_SECRET}: holds {len(given)} bytes, at least {MIN_SECRET_BYTES} are needed")
    return cluster or given or None


def sign(text: bytes, secret: bytes, *, purpose: str) -> str:
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
    """STALE: a member's old or missing challenge."""

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
        """Verdict and the answer's nonce. A repeated call is FORGED."""
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


# ---- keys

LOOK_EVERY_S = 1.0  # interval of checks of a key file
LOOK_AGAIN_S = 0.05  # least interval after unknown keys
MAX_KEYS = 4096
MAX_HEADER_CHARS = 4096
SCHEME = "bearer "
KEY_HEADER = "x-api-key"  # of Anthropic's clients


class KeyRing:
    """Keys of one kind; an empty ring admits all."""

    def __init__(self, *, key: str | None = None, file: str | None = None, flag: str = "--api-key") -> None:
        if key is not None and not _is_sound(key):
            raise ConfigError(f"{flag}: must be printable, without spaces")
        self._flag = flag
        self._file = file
        self._own = () if key is None else (key,)
        self._stamp: tuple[int, int, int] | None = None
        self._looked_at_s = -LOOK_EVERY_S
        self._take(())
        if file is not None:
            self._stamp = _stamp(file)
            self._take(self._read(file))
            warn_if_others_read(file)

    @property
    def is_set(self) -> bool:
        return bool(self._keys)

    @property
    def has_file(self) -> bool:
        return self._file is not None

    @property
    def first(self) -> str | None:
        return self._keys[0] if self._keys else None

    def holder(self, authorization: str) -> str | None:
        """A loggable name of a known key."""
        if not authorization or len(authorization) > MAX_HEADER_CHARS or authorization[: len(SCHEME)].lower() != SCHEME:
            return None
        given = _digest(authorization[len(SCHEME) :].strip())
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return given.hex()[:16] if any(matches) else None

    def refresh(self, now_s: float, *, every_s: float = LOOK_EVERY_S, at_once: bool = False) -> None:
        """Read a changed file, at most every `every_s`; keep the keys if it is unusable."""
        if self._file is None or (now_s < self._looked_at_s + every_s and not at_once):
            return
        self._looked_at_s = now_s
        stamp = _stamp(self._file)
        if stamp == self._stamp and not at_once:
            return
        self._stamp = stamp
        try:
            self._take(self._read(self._file))
        except ConfigError as error:
            log.error("%s (the keys of before stay valid)", error)
            return
        log.info("%s: read again, %d keys", self._file, len(self._keys))

    def _take(self, keys: tuple[str, ...]) -> None:
        self._keys = (*self._own, *keys)
        self._digests = tuple(_digest(k) for k in self._keys)

    def _read(self, file: str) -> tuple[str, ...]:
        try:
            lines = Path(file).read_text().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._flag}-file: cannot read {file}: {error}") from None
        keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
        if not 0 < len(keys) <= MAX_KEYS:
            raise ConfigError(f"{self._flag}-file: {file} holds {len(keys)} keys; one to {MAX_KEYS}, one a line")
        for number, key in enumerate(keys, 1):
            if not _is_sound(key):
                raise ConfigError(f"{self._flag}-file: {file}: key {number} is not printable, or has spaces")
        return keys


class Access(IntEnum):
    """Rights of a caller; higher values include lower ones."""

    NONE = 0
    USER = 1
    ADMIN = 2


class Caller(msgspec.Struct, frozen=True):
    """A caller, with its key's loggable name."""

    access: Access
    name: str = ""


@dataclass(frozen=True, slots=True)
class KeyGate:
    """Both kinds of keys; without admin keys an API key permits all."""

    api: KeyRing
    admin: KeyRing

    def caller(self, authorization: str, now_s: float) -> Caller:
        self.api.refresh(now_s)
        self.admin.refresh(now_s)
        admin, user = self._holders(authorization)
        if authorization and admin is None and user is None:  # perhaps a new key: read the file before refusing
            self.api.refresh(now_s, every_s=LOOK_AGAIN_S)
            self.admin.refresh(now_s, every_s=LOOK_AGAIN_S)
            admin, user = self._holders(authorization)
        if admin is not None:
            return Caller(Access.ADMIN, admin)
        if user is not None or not self.api.is_set:
            return Caller(Access.USER if self.admin.is_set else Access.ADMIN, user or "")
        return Caller(Access.NONE)

    def _holders(self, authorization: str) -> tuple[str | None, str | None]:
        return self.admin.holder(authorization), self.api.holder(authorization)

    def refusal(self, caller: Caller, need: Access) -> tuple[int, str] | None:
        if caller.access >= need:
            return None
        if need is Access.ADMIN and self.admin.is_set:
            status = 403 if caller.name else 401
            return status, "this needs the admin key (--admin-api-key); send it as 'Authorization: Bearer KEY'"
        return 401, "the API key is missing or wrong; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"

    def reload(self, now_s: float) -> None:
        """Read both files (SIGHUP)."""
        self.api.refresh(now_s, at_once=True)
        self.admin.refresh(now_s, at_once=True)

    @property
    def is_set(self) -> bool:
        return self.api.is_set


def open_gate(
    *, api_key: str | None, api_key_file: str | None, admin_api_key: str | None, admin_api_key_file: str | None
) -> KeyGate:
    return KeyGate(
        KeyRing(key=api_key, file=api_key_file, flag="--api-key"),
        KeyRing(key=admin_api_key, file=admin_api_key_file, flag="--admin-api-key"),
    )


def authorization_of(headers: Mapping[str, str]) -> str:
    """The Authorization header, also for `x-api-key`."""
    given = headers.get("Authorization", "")
    key = "" if given else headers.get(KEY_HEADER, "")
    return f"Bearer {key}" if key else given


def owner_of(authorization: str) -> str:
    """A key's name as owner of stored data."""
    scheme, key = authorization[: len(SCHEME)], authorization[len(SCHEME) :].strip()
    return _digest(key).hex() if scheme.lower() == SCHEME else ""


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def authorization_header(authorization: str) -> dict[str, str]:
    return {"Authorization": authorization} if authorization else {}


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_sound(key: str) -> bool:
    return bool(key) and key.isprintable() and " " not in key


def _stamp(file: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
