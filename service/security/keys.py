"""API keys from a flag and a reloaded file, and their rights.

Keys are compared by digest, all of them, in constant time.
"""

import hashlib
import hmac
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import msgspec

from service.flags import ConfigError
from service.security.secret import warn_if_others_read

LOOK_EVERY_S = 1.0  # interval of checks of a key file
LOOK_AGAIN_S = 0.05  # least interval after unknown keys
MAX_KEYS = 4096
MAX_HEADER_CHARS = 4096
SCHEME = "bearer "
KEY_HEADER = "x-api-key"  # of Anthropic's clients

log = logging.getLogger(__name__)


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
        """Return a loggable name of a known key."""
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
    """Return the Authorization header, also for `x-api-key`."""
    given = headers.get("Authorization", "")
    key = "" if given else headers.get(KEY_HEADER, "")
    return f"Bearer {key}" if key else given


def owner_of(authorization: str) -> str:
    """Return a key's name as owner of stored data."""
    scheme, key = authorization[: len(SCHEME)], authorization[len(SCHEME) :].strip()
    return _digest(key).hex() if scheme.lower() == SCHEME else ""


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


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
