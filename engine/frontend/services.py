"""What every handler works with, built once per worker: engine client, tokenizer, template, limits, metrics.

Owns the seeds and names given to requests that bring none. Must not know any API's shape.
"""

import asyncio
import random
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from engine.frontend.bootstrap_allowlist import BootstrapAllowlist
from engine.frontend.client.deadline import request_timeout_s
from engine.frontend.client.engine_client import EngineClient
from engine.frontend.client.scheduler_link import SchedulerLink
from engine.frontend.metrics.worker import Metrics
from engine.frontend.role_switch import RoleSwitch
from engine.sampling_params import SamplingParams
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from service.http.errors import bad_field
from service.security.browser import BrowserRule
from service.security.keys import Gate
from service.telemetry.tracer import Tracer

ANY_MODEL = ("", "default", "unknown")  # "unknown" is what sglang-router writes when the client named none
INLINE_CHARS = 2000  # shorter texts are tokenized in the event loop: that costs less than a thread switch


@dataclass(frozen=True, kw_only=True)
class Services:
    """`server_info`: flat, shown by /server_info (no secrets). `dead`: why the engine cannot serve (None: it can)."""

    client: EngineClient
    scheduler: SchedulerLink
    tokenizer: Tokenizer
    template: ChatTemplate | None
    metrics: Metrics
    model_path: str
    served_name: str
    mode: str
    vocab_size: int
    model_context_length: int
    default_bootstrap_port: int
    sampling_defaults: Mapping[str, float | int]
    server_info: Mapping[str, Any]
    model_info: Mapping[str, Any]
    gate: Gate
    browser: BrowserRule
    bootstrap_allowlist: BootstrapAllowlist
    dead: Callable[[], str | None]
    health_timeout_s: float
    started_unix_s: int
    prng: random.Random
    incarnation: str = field(default_factory=lambda: secrets.token_hex(16))  # of this life of the process
    tool_call_parser: str | None = None
    return_hidden_states: bool = False  # requests may ask for them
    embedding_pooling: str = "last"
    default_deadline_s: float | None = None
    lora: bool = False  # requests may name adapters
    switch: RoleSwitch | None = None  # None: this worker's role is for good
    tracer: Tracer = field(default_factory=lambda: Tracer(ring_size=0))
    tokenizer_pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "tokenize"))

    @property
    def weight_version(self) -> str:
        """Name of the weights: what the last update said, or the flag."""
        return str(self.scheduler.updated.get("weight_version", self.model_info["weight_version"]))

    @property
    def context_length(self) -> int:
        """Longest prompt plus answer: the model's context, and not more than the KV cache can hold."""
        kv = self.scheduler.info.get("max_total_num_tokens")
        return min(self.model_context_length, kv) if isinstance(kv, int) else self.model_context_length

    def timeout_of(self, request: web.BaseRequest) -> float | None:
        """Seconds that the client waits from now; None: for ever. Raises ApiError(400)."""
        return request_timeout_s(request.headers, default_s=self.default_deadline_s)

    async def encode(self, text: str, *, field: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; a long text is worked on in a thread. Raises ApiError(400) naming `field`."""
        try:
            if len(text) < INLINE_CHARS:
                return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            run = asyncio.get_running_loop().run_in_executor
            return await run(
                self.tokenizer_pool, lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            )
        except ValueError as e:
            raise bad_field(field, str(e)) from None

    def mint_room(self) -> int:
        """A room for a request that transfers nothing (fake); never 0."""
        return self.prng.randrange(1, 2**63)

    def mint_id(self, prefix: str) -> str:
        """Unlike any other worker's and unguessable: clients abort by it."""
        return prefix + secrets.token_hex(16)

    def samples_of(self, params: SamplingParams) -> list[SamplingParams]:
        """n parameters for n samples: each with its own seed, following from the given one if there is one."""
        first = self.prng.getrandbits(62) if params.seed is None else params.seed
        return [msgspec.structs.replace(params, n=1, seed=_int64(first + j)) for j in range(params.n)]


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


SERVICES: web.RequestKey[Services] = web.RequestKey("services", Services)
