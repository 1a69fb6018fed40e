"""Index of prompt prefixes cached at workers: key (prefix_index.py) -> a bit per worker. Pure.

Keys cover everything before them, so a walk along a prompt matches all workers, like SGLang's tree.

    sent       a request with this prefix went there; LRU, `max_blocks` per worker (`guessed`)
    reported   by a KV event, until another one removes it
    answered   the tokens of an answer behind a prompt whose last keys and rest are known

Stores, of negative ids, hold what their workers have held. Entries of gone workers are swept by
later requests.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec

from router.body import CHATS, ParsedBody, prompt_of
from router.pool.worker import NO_NAMES, SharedStore
from service.http.errors import JSON_ERRORS, decode_or_none
from service.kv_events import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    TOKEN_BYTES,
    name_of,
    named,
    namespace_of,
    next_link,
    open_chain,
    token_bytes,
    token_seed,
)

Group = tuple[int, int]
Data = bytes | memoryview  # of prompts

MAX_ANSWERS = 1 << 14
MAX_STORES = 64
_CLOSING = b']" \n'  # ends a prompt's JSON, but no prompt that goes on
SWEEP = 256  # entries of gone workers that each request drops


@dataclass(slots=True, eq=False)
class _Part:
    """One worker's prefixes: keys whose entry has `bit`."""

    bit: int
    guessed: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)  # least recently used first
    reported: set[Hashable] = field(default_factory=set)


@dataclass(slots=True)
class PrefixMatch:
    """Workers by match length: (number of prefixes, bits of workers with exactly so many), fewest
    first. Valid until the index changes.
    """

    groups: list[Group]
    _owner: Mapping[int, int]
    _parts: Mapping[int, _Part]
    index: "PrefixIndex"

    def depth(self, worker_id: int) -> int:
        part = self._parts.get(worker_id)
        if part is None:
            return 0
        return next((depth for depth, bits in self.groups if bits & part.bit), 0)

    @property
    def num_places(self) -> int:
        return max(1, len(self._owner))

    def ids(self, bits: int, start: int = 0) -> Iterator[int]:
        """Yield the workers of `bits`, cyclically from `start`."""
        later = bits >> start << start
        for part in (later, bits ^ later):
            while part:
                low = part & -part
                yield self._owner[low.bit_length() - 1]
                part ^= low


class PrefixIndex:
    def __init__(self, *, max_blocks: int) -> None:
        assert max_blocks >= 1
        self._max_blocks = max_blocks
        self._holders: dict[Hashable, int] = {}
        self._parts: dict[int, _Part] = {}
        self._owner: dict[int, int] = {}  # bit position -> id of a live worker
        self._live = 0  # their bits
        self._free: list[int] = []  # bit positions without entries
        self._num_bits = 0
        self._leaving: list[_Part] = []
        self._answers: OrderedDict[tuple[int, Hashable], tuple[bytes, int]] = OrderedDict()  # (rest, tokens)
        self._stores: OrderedDict[str, int] = OrderedDict()  # by place; least recently named first
        self._store_ids = count(-1, -1)
        self._store_of: dict[int, tuple[int, SharedStore]] = {}  # by worker
        self._store_tokens = Counter[int]()  # that a store holds, by its id

    def share(self, worker_id: int, store: SharedStore | None) -> None:
        shared = self._store_of.pop(worker_id, None)
        if shared is not None:
            self._store_tokens[shared[0]] -= shared[1].tokens
            self._store_tokens = +self._store_tokens  # without stores that no worker names
        if store is None:
            return
        if store.place not in self._stores:
            self._stores[store.place] = next(self._store_ids)
        self._stores.move_to_end(store.place)
        at = self._stores[store.place]
        self._store_of[worker_id] = at, store
        self._store_tokens[at] += store.tokens
        if len(self._stores) > MAX_STORES:
            self.forget(self._stores.popitem(last=False)[1])

    def store_of(self, worker_id: int) -> tuple[int, SharedStore] | None:
        return self._store_of.get(worker_id)

    def clear(self, worker_id: int) -> None:
        for holder in self._holders_of(worker_id):  # a flush empties its store, too
            self.forget(holder)

    def note_answer(self, worker_id: int, keys: Sequence[Hashable], data: Data, num_tokens: int) -> None:
        """Record that the worker holds the prompt's rest behind its keys, and the answer."""
        rest = data[len(keys) * BLOCK_BYTES :]
        if not keys or len(rest) >= BLOCK_BYTES:
            return
        for holder in self._holders_of(worker_id):
            self._answers[holder, keys[-1]] = bytes(rest).rstrip(_CLOSING), num_tokens
            self._answers.move_to_end((holder, keys[-1]))
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def behind(self, worker_id: int, keys: Sequence[Hashable], depth: int, data: Data) -> int:
        """The worker's tokens behind `depth` keys of a prompt that continues an answer."""
        found = self._answers.get((worker_id, keys[depth - 1])) if depth else None
        if found is None:
            return 0
        rest, num_tokens = found
        begin = depth * BLOCK_BYTES
        return len(rest) // TOKEN_BYTES + num_tokens if data[begin : begin + len(rest)] == rest else 0

    def match(self, keys: Sequence[Hashable]) -> PrefixMatch:
        groups: list[Group] = []
        holders, with_all = self._holders, self._live
        for depth, key in enumerate(keys):
            now = holders.get(key, 0) & with_all
            if now != with_all:
                if depth:
                    groups.append((depth, with_all & ~now))
                with_all = now
                if not now:
                    return PrefixMatch(groups, self._owner, self._parts, self)
        if keys and with_all:
            groups.append((len(keys), with_all))
        return PrefixMatch(groups, self._owner, self._parts, self)

    def touch(self, worker_id: int, keys: Sequence[Hashable]) -> None:
        """Record a request with these prefixes. The longest expires first."""
        for holder in self._holders_of(worker_id):
            self._touch(holder, keys)
        self._sweep()

    def _touch(self, holder: int, keys: Sequence[Hashable]) -> None:
        part = self._part(holder)
        guessed, reported, holders, bit = part.guessed, part.reported, self._holders, part.bit
        for key in reversed(keys):
            if key in guessed:
                guessed.move_to_end(key)
            elif key not in reported:
                guessed[key] = None
                holders[key] = holders.get(key, 0) | bit
        room = self._store_tokens[holder] // BLOCK_TOKENS  # 0: of a worker, or unknown
        self._trim(part, min(self._max_blocks, room) if room > 0 else self._max_blocks)

    def store_all(self, worker_id: int, keys: Sequence[Hashable]) -> None:
        part, holders = self._part(worker_id), self._holders
        reported, guessed, bit = part.reported, part.guessed, part.bit
        for key in keys[: self._max_blocks - len(reported)]:
            guessed.pop(key, None)
            reported.add(key)
            holders[key] = holders.get(key, 0) | bit
        for store in self._holders_of(worker_id)[1:]:
            self._touch(store, keys)

    def remove_all(self, worker_id: int, keys: Collection[Hashable]) -> None:
        """Remove reported prefixes; most may be unknown."""
        part = self._part(worker_id)
        for key in part.reported.intersection(keys):
            part.reported.discard(key)
            self._clear(key, part.bit)
        if part.guessed and not part.guessed.keys().isdisjoint(keys):
            for key in part.guessed.keys() & keys:
                del part.guessed[key]
                self._clear(key, part.bit)

    def shrink(self, worker_id: int, num_blocks: int) -> None:
        """Drop the oldest unreported prefixes beyond the worker's cache size."""
        part = self._part(worker_id)
        self._trim(part, max(0, num_blocks - len(part.reported)))

    def forget(self, worker_id: int) -> None:
        part = self._parts.pop(worker_id, None)
        if part is not None:
            position = part.bit.bit_length() - 1
            del self._owner[position]
            self._live &= ~part.bit
            self._leaving.append(part)
            for answer in [answer for answer in self._answers if answer[0] == worker_id]:
                del self._answers[answer]

    def num_blocks(self, worker_id: int) -> int:
        part = self._parts.get(worker_id)
        return 0 if part is None else len(part.guessed) + len(part.reported)

    def __len__(self) -> int:
        return len(self._holders)

    # ---- inside

    def _holders_of(self, worker_id: int) -> tuple[int, ...]:
        store = self._store_of.get(worker_id)
        return (worker_id,) if store is None else (worker_id, store[0])

    def _part(self, worker_id: int) -> _Part:
        part = self._parts.get(worker_id)
        if part is None:
            position = self._free.pop() if self._free else self._num_bits
            self._num_bits = max(self._num_bits, position + 1)
            part = self._parts[worker_id] = _Part(1 << position)
            self._owner[position] = worker_id
            self._live |= part.bit
        return part

    def _trim(self, part: _Part, limit: int) -> None:
        while len(part.guessed) > limit:
            self._clear(part.guessed.popitem(last=False)[0], part.bit)

    def _clear(self, key: Hashable, bit: int) -> None:
        left = self._holders[key] ^ bit  # the bit is set
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]

    def _sweep(self) -> None:
        budget = SWEEP
        while self._leaving and budget:
            part = self._leaving[-1]
            while budget and (part.guessed or part.reported):
                key = part.guessed.popitem()[0] if part.guessed else part.reported.pop()
                self._clear(key, part.bit)
                budget -= 1
            if not part.guessed and not part.reported:
                self._leaving.pop()
                self._free.append(part.bit.bit_length() - 1)

    def check(self) -> None:
        expected: dict[Hashable, int] = {}
        for part in self._all_parts():
            assert not part.reported & part.guessed.keys()
            assert len(part.guessed) <= self._max_blocks and len(part.reported) <= self._max_blocks
            for key in (*part.guessed, *part.reported):
                expected[key] = expected.get(key, 0) | part.bit
        assert expected == self._holders
        assert self._live == sum(part.bit for part in self._parts.values())
        positions = [part.bit.bit_length() - 1 for part in self._all_parts()] + self._free
        assert sorted(positions) == list(range(self._num_bits))

    def _all_parts(self) -> Iterator[_Part]:
        yield from self._parts.values()
        yield from self._leaving


# ---- keys of prompts

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


def keyed_prompt(parsed: ParsedBody, event_names: Mapping[str, str] = NO_NAMES) -> tuple[list[int], Data]:
    """A prompt's keys and their data: of a batch of ids its first prompt, of a batch of texts all.

    They hash the prompt's JSON text or token ids; without a tokenizer, only ids match workers'
    events. Prompts below a block (128 tokens) have no key. `event_names`: of adapters.
    """
    fields, prompt = parsed.fields, memoryview(prompt_of(parsed.api, parsed.fields))
    if parsed.api in CHATS:
        if len(prompt) < BLOCK_BYTES:
            return [], prompt
        seed = b"\0".join((_text(fields, "model"), _text(fields, "lora_path"), _text(fields, "tools")))
        seed += named(_namespace(fields))
        return chain(parsed.api.encode() + b"\0" + seed, prompt), prompt
    return _plain_keys(fields, prompt, event_names)


def _plain_keys(
    fields: dict[str, msgspec.Raw], prompt: memoryview, event_names: Mapping[str, str]
) -> tuple[list[int], Data]:
    """Keys of text (starts with a quote), ids (with a digit), or a batch in brackets."""
    start = bytes(prompt[:64]).lstrip(b"[ \t\r\n")
    if start[:1].isdigit():
        data: Data = _first_ids(prompt)
        return chain(token_seed(_variant(fields, event_names), _namespace(fields)), data), data
    if start[:1] != b'"':
        return [], b""
    data = prompt[min(len(prompt), 64) - len(start) :]
    seed = b"\0".join((b"text", _text(fields, "model"), _text(fields, "lora_path")))
    return chain(seed + named(_namespace(fields)), data), data


def _first_ids(prompt: memoryview) -> bytes:
    try:
        is_batch = bytes(prompt[:64]).replace(b" ", b"").startswith(b"[[")
        return token_bytes(_batch_decoder.decode(prompt)[0] if is_batch else _ids_decoder.decode(prompt))
    except (*JSON_ERRORS, OverflowError, IndexError):
        return b""


def _variant(fields: dict[str, msgspec.Raw], event_names: Mapping[str, str]) -> str:
    lora, model = (_first_string(fields.get(name)) or "" for name in ("lora_path", "model"))
    ends = (model, model.rpartition(":")[2])  # ADAPTER or BASE:ADAPTER
    name = lora or next((end for end in ends if end in event_names), "")
    return event_names.get(name, name)


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
