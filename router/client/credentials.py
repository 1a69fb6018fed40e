"""Keys that the router sends to workers."""

import time
from collections.abc import Callable

from service.security.keys import KeyRing, authorization_header, bearer


class Credentials:
    """The router's own keys replace the client's. `api`: clients' keys, mostly shared with
    workers. `for_client` makes the headers of a client's request.
    """

    def __init__(self, *, api: KeyRing, worker: KeyRing | None = None, admin: KeyRing | None = None) -> None:
        self._api = api
        self._worker = worker or KeyRing()
        self._admin = admin or KeyRing()
        own = self._worker.is_set
        self.for_client: Callable[[str], dict[str, str]] = self._own_for_client if own else authorization_header
        self._from_files = [ring for ring in (self._api, self._worker, self._admin) if ring.has_file]

    def own(self) -> dict[str, str]:
        self._refresh()
        return bearer(self._worker.first or self._api.first)

    def own_admin(self) -> dict[str, str]:
        self._refresh()
        return bearer(self._admin.first or self._worker.first or self._api.first)

    def _own_for_client(self, authorization: str) -> dict[str, str]:
        """The headers of a client's request. A key that workers share passes, for rotations."""
        self._refresh()
        known = self._worker.holder(authorization) is not None
        return authorization_header(authorization) if known else bearer(self._worker.first)

    def for_admin(self, authorization: str) -> dict[str, str]:
        self._refresh()
        if self._admin.first is None:
            return self.for_client(authorization)
        known = self._admin.holder(authorization) is not None
        return authorization_header(authorization) if known else bearer(self._admin.first)

    def _refresh(self) -> None:
        """Read key files again each time, as a worker may already refuse the old key."""
        if self._from_files:
            now_s = time.monotonic()
            for ring in self._from_files:
                ring.refresh(now_s, every_s=0.0)
