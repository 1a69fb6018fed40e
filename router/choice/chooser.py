"""One policy per role, and the hints it needs. Pure."""

from collections.abc import Mapping
from functools import partial

import msgspec

from router.body import ParsedBody
from router.choice.cache_aware import CacheAware
from router.choice.policies import (
    ConsistentHashing,
    Draw,
    LeastLoad,
    Policy,
    PowerOfTwo,
    Random,
    RoundRobin,
    RoutingHints,
)
from router.choice.prefix_index import PrefixIndex, prompt_keys
from router.config import ChoiceFlags
from router.pool.worker import Role, Worker
from service.http.errors import decode_or_none
from service.kv_events import BLOCK_BYTES
from service.waiter import BODIES

# In order of precedence, headers before fields.
SESSION_HEADERS = ("X-Session-Id", "X-SMG-Routing-Key")
SESSION_FIELDS = ("session_params", "session_id", "routing_key", "prompt_cache_key", "user")
MAX_SESSION_CHARS = 1024  # of a hashed session


class _SessionParams(msgspec.Struct):
    id: str | int | None = None


class Chooser:
    def __init__(self, policies: Mapping[Role, Policy]) -> None:
        self.policies = policies
        self.needs_keys = any(isinstance(policy, CacheAware) for policy in policies.values())
        self.needs_session = any(isinstance(policy, ConsistentHashing) for policy in policies.values())

    async def hints(self, parsed: ParsedBody, headers: Mapping[str, str], *, size: int) -> RoutingHints:
        """Return the hints of a body of `size` bytes; a thread reads a long one."""
        if not (self.needs_keys or self.needs_session):
            return RoutingHints(prompt_tokens=parsed.prompt_tokens, output_tokens=parsed.output_tokens)
        return await BODIES.run(partial(self.hints_of, parsed, headers), size=size)

    def hints_of(self, parsed: ParsedBody, headers: Mapping[str, str]) -> RoutingHints:
        return RoutingHints(
            prompt_tokens=parsed.prompt_tokens,
            output_tokens=parsed.output_tokens,
            keys=prompt_keys(parsed) if self.needs_keys else (),
            session=session_of(parsed, headers) if self.needs_session else "",
        )

    def cache_of(self, role: Role) -> PrefixIndex | None:
        policy = self.policies.get(role)
        return policy.index if isinstance(policy, CacheAware) else None

    def forget(self, worker: Worker) -> None:
        index = self.cache_of(worker.role)
        if index is not None:
            index.forget(worker.worker_id)


def make_chooser(flags: ChoiceFlags, *, draw: Draw) -> Chooser:
    names = {
        Role.PREFILL: flags.prefill_policy or flags.policy,
        Role.DECODE: flags.decode_policy or flags.policy,
        Role.UNIFIED: flags.policy,
    }
    return Chooser({role: _make(name, flags, draw) for role, name in names.items()})


def _make(name: str, flags: ChoiceFlags, draw: Draw) -> Policy:
    match name:
        case "least_load":
            return LeastLoad(draw)
        case "cache_aware":
            return CacheAware(draw, PrefixIndex(max_blocks=max(1, flags.max_tree_size // BLOCK_BYTES)), flags)
        case "power_of_two":
            return PowerOfTwo(draw)
        case "round_robin":
            return RoundRobin(draw)
        case "random":
            return Random(draw)
        case "consistent_hashing":
            return ConsistentHashing(draw)
    raise AssertionError(f"unknown policy {name!r}")


def session_of(parsed: ParsedBody, headers: Mapping[str, str]) -> str:
    named = next((value for name in SESSION_HEADERS if (value := headers.get(name))), "")
    if not named:
        named = next((text for name in SESSION_FIELDS if (text := _session_text(parsed.fields.get(name)))), "")
    return named[:MAX_SESSION_CHARS]


def _session_text(raw: msgspec.Raw | None) -> str:
    value = None if raw is None else decode_or_none(raw, _SessionParams | str | int | None)
    value = value.id if isinstance(value, _SessionParams) else value
    return "" if value is None else str(value)
