"""What every handler works with, built once per role session. Knows no API's shape."""

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from engine.config import EngineConfig, ServerConfig
from engine.frontend.bootstraps import BootstrapAllowlist, BootstrapFields, build_bootstraps
from engine.frontend.client.engine_client import EngineClient
from engine.frontend.client.leaders import Leaders
from engine.frontend.client.other_frontends import OtherFrontends
from engine.frontend.ignored_fields import IgnoredFields
from engine.frontend.metrics.worker import Metrics
from engine.frontend.role_switch import RoleSwitch
from engine.frontend.served_model import ServedModel
from engine.messages import Bootstrap
from engine.sampling_params import SamplingParams
from engine.stamps import Stamps
from service.http.deadline import UNITS_S, seconds_of
from service.http.errors import ApiError, bad_field
from service.http.reconnect import StreamLogs
from service.responses.book import LocalBook
from service.security.browser import BrowserRule
from service.security.keys import KeyGate
from service.security.secret import VOUCHER_HEADER
from service.telemetry.tracer import Tracer
from service.waiter import Pauses

if TYPE_CHECKING:
    from engine.frontend.images.loader import ImageLoader

HEALTH_TIMEOUT_S = 20.0
DEFAULT_BOOTSTRAP_PORT = 8998
INLINE_CHARS = 2000  # the event loop tokenizes shorter texts: that costs less than a thread switch


@dataclass(frozen=True, kw_only=True)
class FrontendSpec:
    """The parts that one role session serves with. `extra_info`: for /server_info, no secrets. `switch`: None for a fixed role.

    `warms_up`: a first request is computed before the worker is ready. `secret`: by which it knows its router; None: it takes orders of none.
    """

    server: ServerConfig
    engine: EngineConfig
    mode: str = "null"
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    default_bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT
    bootstrap_allowlist: BootstrapAllowlist = field(default_factory=BootstrapAllowlist)
    switch: RoleSwitch | None = None
    health_timeout_s: float = HEALTH_TIMEOUT_S
    warms_up: bool = False
    secret: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class Services:
    """`server_info`: flat, no secrets. `dead`: why the engine cannot serve, or None. `responses`: None: it stores none.

    `others`: the frontends beside this one, if there are any and this is the main one. `stamps`: of the worker's processes; the main one's, too.
    `beating`: streams of heartbeats, which end with the session. `images`: None: the model reads text alone.
    """

    spec: FrontendSpec
    model: ServedModel
    server_info: Mapping[str, Any]
    dead: Callable[[], str | None]
    client: EngineClient
    metrics: Metrics
    tracer: Tracer
    gate: KeyGate
    browser: BrowserRule
    prng: random.Random
    responses: LocalBook | None
    images: "ImageLoader | None" = None
    others: OtherFrontends | None = None
    stamps: Stamps | None = None
    beating: Pauses = field(default_factory=Pauses)
    tokenizer_pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "tokenize"))
    started_unix_s: int = field(default_factory=lambda: int(time.time()))
    warm: asyncio.Event = field(default_factory=asyncio.Event)  # ready, and warmed up
    ignored: IgnoredFields = field(default_factory=IgnoredFields)
    kept: StreamLogs = field(default_factory=StreamLogs)
    incarnation: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def leaders(self) -> Leaders:
        return self.client.leaders

    @property
    def weight_version(self) -> str:
        return str(self.leaders.updated.get("weight_version", self.model.info["weight_version"]))

    @property
    def context_length(self) -> int:
        """Longest prompt plus answer: the model's context, or the KV cache if that is smaller."""
        kv = self.leaders.kv_tokens
        return self.model.context_length if kv is None else min(self.model.context_length, kv)

    def timeout_of(self, request: web.BaseRequest) -> float | None:
        return request_timeout_s(request.headers, default_s=self.spec.server.default_deadline_s)

    async def encode(self, text: str, *, field: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; a thread tokenizes a long text. Raises ApiError(400) naming `field`."""
        encode = self.model.tokenizer.encode
        try:
            if len(text) < INLINE_CHARS:
                return encode(text, add_special_tokens=add_special_tokens)
            run = asyncio.get_running_loop().run_in_executor
            return await run(self.tokenizer_pool, lambda: encode(text, add_special_tokens=add_special_tokens))
        except ValueError as e:
            raise bad_field(field, str(e)) from None

    def bootstraps_of(
        self, request: web.BaseRequest, fields: BootstrapFields, *, num_prompts: int, n: int
    ) -> list[Bootstrap | None]:
        """Return the bootstrap address and room of each sample. Raises ApiError(400), also for a host that may not be named."""
        bootstraps = build_bootstraps(
            fields,
            mode=self.spec.mode,
            num_prompts=num_prompts,
            n=n,
            default_port=self.spec.default_bootstrap_port,
            mint_room=self.mint_room,
        )
        self.spec.bootstrap_allowlist.check(bootstraps, voucher=request.headers.get(VOUCHER_HEADER, ""))
        return bootstraps

    def mint_room(self) -> int:
        """A room for a request with a fake transfer; never 0."""
        return self.prng.randrange(1, 2**63)

    def mint_id(self, prefix: str) -> str:
        """Unique among workers and unguessable: clients abort by it."""
        return prefix + secrets.token_hex(16)

    def samples_of(self, params: SamplingParams) -> list[SamplingParams]:
        """Parameters of the n samples, with consecutive seeds from the given one or a random one."""
        first = self.prng.getrandbits(62) if params.seed is None else params.seed
        return [msgspec.structs.replace(params, n=1, seed=_int64(first + j)) for j in range(params.n)]


def request_timeout_s(headers: Mapping[str, str], *, default_s: float | None) -> float | None:
    """Seconds from now that the client waits; None: no limit. Raises ApiError(400) for a wrong header."""
    for name in UNITS_S:
        text = headers.get(name)
        if text is None:
            continue
        value_s = seconds_of(text, name)
        if value_s is None:
            raise ApiError(400, f"{name}: must be a number greater than 0, got {text[:40]!r}", field=name)
        return value_s
    return default_s


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


SERVICES: web.RequestKey[Services] = web.RequestKey("services", Services)
