"""Pages in a Mooncake Store, which workers share (facts of its client: docs/reports/store.md).

A value is a page file's bytes. Calls release the GIL, except setup and close. They move staged
values, so late ones touch no host page.
"""

import contextlib
import ctypes
import mmap
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar

from engine.core.mem_cache.page_allocator import KVIdentity, is_state
from engine.core.mem_cache.storage_tier import Files, PageClear, PageDelete, PageLookup, PageRead, PageWrite
from engine.flags.hicache import BACKEND, MooncakeStoreConfig, local_address
from engine.hicache.page_files import HEADER_BYTES, check_page, encode_header
from engine.hicache.storage import BadPage, NoRoom, Outcome, PageView
from service.flags import ConfigError
from transfer_backends.contract import BackendUnavailable
from transfer_backends.engines.environment import quiet, set_defaults
from transfer_backends.engines.mooncake import SETTINGS, import_mooncake

BATCH_BYTES, MAX_BATCH = 8 << 20, 16  # a frozen holder takes the reading thread for a minute a page
LOCAL_BUFFER_BYTES = 16 << 20  # of the client; our calls do not use it
TOO_LONG, NO_ROOM, NOT_FOUND, EVICTED = -600, -200, -704, -707  # the last: during the call


def connect(config: MooncakeStoreConfig) -> Any:
    """A client. Raises ConfigError."""
    address = local_address(config.master_server_address)
    set_defaults(SETTINGS)
    try:
        with quiet(1, 2):
            client = import_mooncake("mooncake.store").MooncakeDistributedStore()
            code = client.setup(
                config.local_hostname or address,
                config.metadata_server,
                config.segment_bytes,
                LOCAL_BUFFER_BYTES,
                config.protocol,
                config.device_name,
                config.master_server_address,
            )
    except BackendUnavailable as error:
        raise ConfigError(f"{BACKEND} {error}") from None
    if code != 0:
        raise ConfigError(
            f"{BACKEND} mooncake: its client cannot start: error {code} (master {config.master_server_address})"
        )
    return client


def copies(count: int) -> Any:
    """A put's ReplicateConfig. Raises BackendUnavailable."""
    found = import_mooncake("mooncake.store").ReplicateConfig()
    found.replica_num = count
    return found


class StagedValues:
    """[count, value_bytes], registered with the client."""

    def __init__(self, client: Any, *, count: int, value_bytes: int) -> None:
        self.value_bytes = value_bytes
        self._memory = mmap.mmap(-1, count * value_bytes)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.addresses = [begin + i * value_bytes for i in range(count)]
        whole = memoryview(self._memory)
        self.values = [whole[i * value_bytes : (i + 1) * value_bytes] for i in range(count)]
        if (code := client.register_buffer(begin, count * value_bytes)) != 0:
            raise ConfigError(f"{BACKEND} mooncake: {count * value_bytes} bytes cannot be registered: error {code}")


Works = TypeVar("Works", PageRead, PageWrite)


class MooncakeStore:
    def __init__(
        self, client: Any, *, page_bytes: int, page_of: PageView, copies: Any, master: str, state_bytes: int = 0
    ) -> None:
        self._client = client
        self._copies = copies
        self._master = master
        self._page_of = page_of
        value_bytes = HEADER_BYTES + page_bytes
        self.batch = max(1, min(MAX_BATCH, BATCH_BYTES // value_bytes))
        counts = {False: (self.batch, value_bytes)} | ({True: (1, HEADER_BYTES + state_bytes)} if state_bytes else {})
        self._in, self._out = (
            {kind: StagedValues(client, count=n, value_bytes=size) for kind, (n, size) in counts.items()}
            for _ in range(2)
        )

    def find(self, work: PageLookup) -> tuple[bytes, ...]:
        codes = self._client.batch_is_exist([name_of(work.identity, key) for key in work.keys])
        if failed := [code for code in codes if code < 0]:
            raise OSError(f"the store answers with error {failed[0]}")
        return tuple(key for key, code in zip(work.keys, codes, strict=True) if code == 1)

    def read(self, works: Sequence[PageRead]) -> list[Outcome]:
        return [outcome for part in _alike(works) for outcome in self._read(part, self._in[is_state(part[0].key)])]

    def _read(self, works: Sequence[PageRead], staged: StagedValues) -> list[Outcome]:
        names, count = [name_of(work.identity, work.key) for work in works], len(works)
        codes = self._client.batch_get_into(names, staged.addresses[:count], [staged.value_bytes] * count)
        return [self._land(*landed) for landed in zip(works, codes, staged.values[:count], strict=True)]

    def _land(self, work: PageRead, code: int, value: memoryview) -> Outcome:
        if code < 0:
            return _error(code)
        if code != len(value):
            return BadPage(f"{code} bytes, expected {len(value)}")
        page = self._page_of(work.host_page)
        page[:] = value[HEADER_BYTES:]
        try:
            check_page(bytes(value[:HEADER_BYTES]), page, identity=work.identity, key=work.key)
        except BadPage as error:
            return error
        return None

    def write(self, works: Sequence[PageWrite]) -> list[Outcome]:
        return [outcome for part in _alike(works) for outcome in self._write(part, self._out[is_state(part[0].key)])]

    def _write(self, works: Sequence[PageWrite], staged: StagedValues) -> list[Outcome]:
        names, count = [name_of(work.identity, work.key) for work in works], len(works)
        for work, value in zip(works, staged.values, strict=False):
            value[HEADER_BYTES:] = self._page_of(work.host_page)
            value[:HEADER_BYTES] = encode_header(work.identity, work.key, value[HEADER_BYTES:])
        codes = self._client.batch_put_from(names, staged.addresses[:count], [staged.value_bytes] * count, self._copies)
        return [None if code == 0 else _error(code) for code in codes]

    def delete(self, work: PageDelete) -> Files:
        assert work.identity is not None
        self._client.batch_remove([name_of(work.identity, key) for key in work.keys], True)
        return ()

    def clear(self, work: PageClear) -> None:
        self._client.remove_by_regex(f"^{re.escape(place_of(work.identity))}.*", True)

    def close(self) -> None:
        with contextlib.suppress(ConfigError):  # without its master the client would take 10 s
            local_address(self._master)
            self._client.close()


def _alike(works: Sequence[Works]) -> Iterator[Sequence[Works]]:
    """Pages together, large states alone."""
    for _, part in groupby(works, lambda work: work.key if is_state(work.key) else b""):
        yield list(part)


def _error(code: int) -> Exception:
    if code in (NOT_FOUND, EVICTED):
        return FileNotFoundError()
    if code == TOO_LONG:
        return BadPage("it is longer than a page")
    return (NoRoom if code == NO_ROOM else OSError)(f"the store answers with error {code}")


def place_of(identity: KVIdentity) -> str:
    """Prefix of all names with this layout, dtype, model and version of weights."""
    return f"tandem/{identity.seed().hex()[:32]}/"


def name_of(identity: KVIdentity, key: bytes) -> str:
    return place_of(identity) + key.hex()
