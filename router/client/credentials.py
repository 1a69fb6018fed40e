"""Which key the router shows to workers, for each kind of call."""

import time

from service.security.keys import KeyRing, bearer


class Credentials:
    """A key of the router's own takes the place of the client's. `api`: the clients' keys; workers mostly have the same."""

    def __init__(self, *, api: KeyRing, worker: KeyRing | None = None, admin: KeyRing | None = None) -> None:
        self._api = api
        self._worker = worker or KeyRing()
        self._admin = admin or KeyRing()
        self._from_files = [ring for ring in (self._api, self._worker, self._admin) if ring.has_file]

    @property
    def has_own(self) -> bool:
        """The router has a key for workers, so a client's may not be passed on as it is; or keys that may change."""
        return self._worker.is_set or bool(self._from_files)

    def own(self) -> dict[str, str]:
        """Return the headers of the router's own requests: health, load, information."""
        self._refresh()
        return bearer(self._worker.first or self._api.first)

    def own_admin(self) -> dict[str, str]:
        """Return the headers of the router's own admin calls."""
        self._refresh()
        return bearer(self._admin.first or self._worker.first or self._api.first)

    def for_client(self, authorization: str) -> dict[str, str]:
        """Return the headers for a request with that header. A key that workers have, too, is passed on: while one is rotated out, the client
        knows better than this router which one every worker has.
        """
        self._refresh()
        if self._worker.first is not None and self._worker.holder(authorization) is None:
            return bearer(self._worker.first)
        return {"Authorization": authorization} if authorization else {}

    def for_admin(self, authorization: str) -> dict[str, str]:
        """Return the headers of an admin's call that this router has let through."""
        self._refresh()
        if self._admin.first is None:
            return self.for_client(authorization)
        known = self._admin.holder(authorization) is not None
        return {"Authorization": authorization} if known else bearer(self._admin.first)

    def _refresh(self) -> None:
        """Look at every file, each time: a worker may have read the new key a moment ago, and refuses the old one."""
        if self._from_files:
            now_s = time.monotonic()
            for ring in self._from_files:
                ring.refresh(now_s, every_s=0.0)
