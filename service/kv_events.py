"""KV events of a prefix cache, in the format of vLLM and SGLang.

    PUB    [topic, sequence number (8 bytes, big-endian, from 0), KVEventBatch in msgpack]
    ROUTER [client, "", number] requests the stored batches from that number on;
           answers are [client, "", number, batch] each, and last [client, "", -1, ""]

A gap means lost events. As in vllm/distributed/kv_events.py and
sglang/srt/disaggregation/kv_events.py; reading is lenient, and their oldest versions read ours.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

BlockHash = int | bytes

MEDIUM = "GPU"  # the model's own tier, on any device
END_SEQ = (-1).to_bytes(8, "big", signed=True)
MAX_MESSAGE_BYTES = 16 << 20
MAX_NAMESPACE_CHARS = 1024  # per part


class BlockStored(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Blocks after `parent_block_hash`, None at a prompt's start. `extra_keys` (vLLM's) hold the
    namespace.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None
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
    """A batch; `ts` is Unix time in seconds."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class _NamesBatch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[NameEvent]


def namespace_of(cache_salt: str | None, extra_key: str | None) -> tuple[str, ...]:
    """Return the prefix cache's namespace by request fields, () by default."""
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
    """Return number and events. Raises BadEvent."""
    if len(frames) != 3:
        raise BadEvent(f"a message has 3 frames, not {len(frames)}")
    return read_seq(frames[1]), decode(frames[2])
