"""Keys of prompt prefixes (service/prefix_chain.py). Pure.

They hash the prompt's JSON text or token ids; without a tokenizer, only ids match workers' events.
16 kB cost 32 hashes (30 us). Prompts below a block (128 tokens) have no key: recomputing them beats
any detour.
"""

import msgspec

from router.body import CHATS, ParsedBody, prompt_of
from service.http.json_depth import JSON_ERRORS, decode_or_none
from service.kv_events import namespace_of
from service.prefix_chain import BLOCK_BYTES, name_of, named, next_link, open_chain, token_bytes, token_seed

MAX_KEYS = 4096  # per prompt: 2 MiB of text

_ids_decoder = msgspec.json.Decoder(list[int])
_batch_decoder = msgspec.json.Decoder(list[list[int]])


def chain(seed: bytes, data: bytes | memoryview) -> list[int]:
    link = open_chain(seed)
    keys = []
    for end in range(BLOCK_BYTES, min(len(data), MAX_KEYS * BLOCK_BYTES) + 1, BLOCK_BYTES):
        link = next_link(link, data[end - BLOCK_BYTES : end])
        keys.append(name_of(link))
    return keys


def prompt_keys(parsed: ParsedBody) -> list[int]:
    """Return a prompt's keys: of a batch of ids its first prompt, of a batch of texts all."""
    fields, prompt = parsed.fields, memoryview(prompt_of(parsed.api, parsed.fields))
    if parsed.api in CHATS:
        seed = b"\0".join((_text(fields, "model"), _text(fields, "lora_path"), _text(fields, "tools")))
        seed += named(_namespace(fields))
        return chain(parsed.api.encode() + b"\0" + seed, prompt)
    return _plain_keys(fields, prompt)


def _plain_keys(fields: dict[str, msgspec.Raw], prompt: memoryview) -> list[int]:
    """Return keys of text (starts with a quote), ids (with a digit), or a batch in brackets."""
    start = bytes(prompt[:64]).lstrip(b"[ \t\r\n")
    adapter, namespace = _text(fields, "lora_path"), _namespace(fields)
    if start[:1].isdigit():
        return chain(token_seed(adapter, namespace), _first_ids(prompt))
    if start[:1] != b'"':
        return []
    skipped = min(len(prompt), 64) - len(start)
    return chain(b"text\0" + _text(fields, "model") + b"\0" + adapter + named(namespace), prompt[skipped:])


def _first_ids(prompt: memoryview) -> bytes:
    """Return the first prompt's ids, empty if invalid."""
    try:
        if bytes(prompt[:64]).replace(b" ", b"").startswith(b"[["):
            ids = _batch_decoder.decode(prompt)[0]
        else:
            ids = _ids_decoder.decode(prompt)
        return token_bytes(ids)
    except (*JSON_ERRORS, OverflowError, IndexError):
        return b""


def _namespace(fields: dict[str, msgspec.Raw]) -> tuple[str, ...]:
    if not fields.keys() & {"cache_salt", "extra_key"}:
        return ()
    return namespace_of(_first_string(fields.get("cache_salt")), _first_string(fields.get("extra_key")))


def _first_string(raw: msgspec.Raw | None) -> str | None:
    value = None if raw is None else decode_or_none(raw)
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, str) else None


def _text(fields: dict[str, msgspec.Raw], name: str) -> bytes:
    value = fields.get(name)
    return b"" if value is None else bytes(value)
