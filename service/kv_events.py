"""KV events of a prefix cache, in the format of vLLM and SGLang.

    PUB    [topic, sequence number (8 bytes, big-endian, from 0), KVEventBatch in msgpack]
    ROUTER [client, "", number] requests the stored batches from that number on;
           answers are [client, "", number, batch] each, and last [client, "", -1, ""]

A gap means lost events. As in vllm/distributed/kv_events.py and
sglang/srt/disaggregation/kv_events.py; reading is lenient, and their oldest versions read ours.
"""

import hashlib
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec

BlockHash = int | bytes

MEDIUM = "GPU"  # the model's own tier, on any device
END_SEQ = (-1).to_bytes(8, "big", signed=True)
MAX_MESSAGE_BYTES = 16 << 20
MAX_NAMESPACE_CHARS = 1024  # per part


class BlockStored(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Blocks after a parent, None at a prompt's start. vLLM's `extra_keys` hold the namespace."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None  # of our workers a digest, so that a name with other weights matches nothing
    extra_keys: Any = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, frozen=True):
    block_hashes: list[BlockHash]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, frozen=True):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class NamesStored(msgspec.Struct, array_like=True, tag="BlockStored", frozen=True):
    """A `BlockStored` with our keys as hashes: undecoded tokens take a tenth of the time."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: msgspec.Raw
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None


class NamesRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved", frozen=True):
    block_hashes: list[int]


NameEvent = NamesStored | NamesRemoved | AllBlocksCleared
AnyEvent = KVEvent | NameEvent
Decode = Callable[[bytes], Sequence[AnyEvent]]  # raises `BadEvent`


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """`ts` is Unix time in seconds."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class _NamesBatch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[NameEvent]


def namespace_of(cache_salt: str | None, extra_key: str | None) -> tuple[str, ...]:
    """The prefix cache's namespace by request fields, () by default."""
    return tuple(part for part in (cache_salt, extra_key) if part)


class BadEvent(ValueError):
    """A message that is no batch of KV events."""


_TYPES: dict[str, type[KVEvent]] = {cls.__name__: cls for cls in (BlockStored, BlockRemoved, AllBlocksCleared)}
_decoder = msgspec.msgpack.Decoder()
_usual_decoder = msgspec.msgpack.Decoder(KVEventBatch)
_names_decoder = msgspec.msgpack.Decoder(_NamesBatch)
_encoder = msgspec.msgpack.Encoder()


def encode_batch(batch: KVEventBatch) -> bytes:
    return _encoder.encode(batch)


def decode_events(payload: bytes) -> list[KVEvent]:
    """Decode known events. Raises BadEvent."""
    try:
        return _usual_decoder.decode(payload).events  # a third of the time
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _decode_leniently(payload)


def decode_names(payload: bytes) -> list[NameEvent]:
    """Decode a batch with our keys. Raises BadEvent."""
    try:
        return _names_decoder.decode(payload).events
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadEvent(f"no batch of named blocks: {error}") from None


def _decode_leniently(payload: bytes) -> list[KVEvent]:
    try:
        batch = _decoder.decode(payload)
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        return [event for raw in events if (event := _event(raw)) is not None]
    except (msgspec.MsgspecError, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise BadEvent(f"no batch of KV events: {error}") from None


def _event(raw: Any) -> KVEvent | None:
    if isinstance(raw, dict):
        known = _TYPES.get(raw.get("type", ""))
        fields = [] if known is None else [raw.get(name) for name in known.__struct_fields__]
    else:
        known, fields = _TYPES.get(raw[0]), list(raw[1:])
    return None if known is None else msgspec.convert([known.__name__, *fields], known)


def seq_bytes(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


def read_seq(frame: bytes) -> int:
    if len(frame) != 8:
        raise BadEvent(f"a sequence number has 8 bytes, not {len(frame)}")
    return int.from_bytes(frame, "big")


def read_message(frames: Sequence[bytes], decode: Decode = decode_events) -> tuple[int, Sequence[AnyEvent]]:
    """Number and events. Raises BadEvent."""
    if len(frames) != 3:
        raise BadEvent(f"a message has 3 frames, not {len(frames)}")
    return read_seq(frames[1]), decode(frames[2])


# ---- keys of prompts

BLOCK_BYTES = 512
TOKEN_BYTES = 4
BLOCK_TOKENS = BLOCK_BYTES // TOKEN_BYTES
NAME_BYTES = 8
VERSION = 1  # of these keys, in `kv_events_config` of /server_info

_sha1 = hashlib.sha1


def open_chain(seed: bytes) -> bytes:
    """Keys of prompt prefixes, alike in routers and workers, so that KV events match.

        link[-1] = H(seed)     link[i] = H(link[i - 1], next BLOCK_BYTES of the prompt)
        key = first 8 bytes of a link

    Token ids are four bytes, little-endian. A page has the key of H(last link before its end, bytes
    after it), so a block's last page has the block's. The lowest bit is 1 at a block's end. SHA-1
    is hashlib's fastest; collisions only misroute their own client.
    """
    return _sha1(seed, usedforsecurity=False).digest()


def next_link(link: bytes, block: bytes | memoryview) -> bytes:
    return _sha1(link + block, usedforsecurity=False).digest()


def name_of(link: bytes) -> int:
    """The key of a prefix of whole blocks."""
    return int.from_bytes(link[:NAME_BYTES]) | 1


def block_names(names: list[int], page_size: int) -> list[int]:
    """The blocks' keys among consecutive pages'."""
    pages = max(1, BLOCK_TOKENS // page_size)  # per block
    first = next((place for place, name in enumerate(names[:pages]) if name & 1), len(names))
    return names[first::pages]


def token_bytes(tokens: Sequence[int]) -> bytes:
    """The hashed bytes. Raises OverflowError."""
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def token_seed(variant: str = "", namespace: Sequence[str] = ()) -> bytes:
    """The seed of ids. `variant`: the `lora_name` of events."""
    return b"ids\0" + (msgspec.json.encode(variant) if variant else b"") + named(namespace)


def named(namespace: Sequence[str]) -> bytes:
    """The namespace's part of a seed."""
    return b"\0" + msgspec.json.encode(namespace) if namespace else b""


def pages_make_blocks(page_size: int) -> bool:
    return BLOCK_TOKENS % page_size == 0


def page_names(
    link: bytes, before: Sequence[int], tokens: Sequence[int], page_size: int
) -> Iterator[tuple[int, bytes]]:
    """Yield each page's key, and the link where a block ends, else b"".

    `link` is of the block before, `before` are the tokens in between.
    """
    assert len(tokens) % page_size == 0 and len(before) % page_size == 0
    size = BLOCK_TOKENS if pages_make_blocks(page_size) else page_size
    running, end = _sha1(link + token_bytes(before), usedforsecurity=False), len(before)
    data, step = token_bytes(tokens), page_size * TOKEN_BYTES
    for at in range(0, len(data), step):
        running.update(data[at : at + step])
        digest, end = running.digest(), end + page_size
        if end % size:
            yield int.from_bytes(digest[:NAME_BYTES]) & ~1, b""
        else:
            yield name_of(digest), digest
            running = _sha1(digest, usedforsecurity=False)
