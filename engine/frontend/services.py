"""Services of all handlers, built per role session; API-independent."""

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from engine.config import EngineConfig, ServerConfig
from engine.frontend.bootstraps import BootstrapAllowlist, BootstrapFields, build_bootstraps
from engine.frontend.client.dp_policy import RankPolicy, Rule, rule_of
from engine.frontend.client.engine_client import EngineClient, TextReader
from engine.frontend.client.leaders import Leaders
from engine.frontend.client.other_frontends import OtherFrontends
from engine.frontend.client.shared_requests import SharedRequests
from engine.frontend.client.tracing import Traces
from engine.frontend.errors import IgnoredFields
from engine.frontend.metrics.worker import Metrics
from engine.frontend.role_switch import RoleSwitch
from engine.frontend.served_model import ServedModel, load_served_model
from engine.ipc import MAIN_FRONTEND
from engine.lora.peft_config import named_paths
from engine.messages import Bootstrap, GenerateRequest
from engine.model_files.vision_config import VisionConfig
from engine.sampling_params import SamplingParams
from engine.stamps import Stamps
from engine.text.sample import SampleIds, SampleText
from engine.text.tokenizer import Tokenizer
from service.flags import ConfigError, values_by_name
from service.http.bodies import MAX_VALUES
from service.http.errors import ApiError, bad_field
from service.http.guard import UNITS_S, seconds_of
from service.http.reconnect import StreamLogs
from service.http.server import RequestLimits
from service.responses.store import LocalBook, ResponseStore
from service.security.browser import BrowserRule
from service.security.keys import KeyGate, open_gate
from service.security.secret import VOUCHER_HEADER
from service.telemetry.exporters import open_exporter
from service.telemetry.records import Tracer
from service.waiter import Aside, Pauses

if TYPE_CHECKING:
    from engine.frontend.images.loader import ImageLoader
HEALTH_TIMEOUT_S = 20.0
DEFAULT_BOOTSTRAP_PORT = 8998
INLINE_CHARS = 2000  # shorter texts are tokenized inline: cheaper than a thread switch
GROUP_CHARS = 64 << 10  # of short texts per thread job, so that other requests get in between
HUGE_CHARS = 1 << 20  # such a text takes a second; only these wait for one another
# Per text, or `BYTES_PER_TOKEN` per token of a longer context: tokenizing takes some 70 times its memory.
MAX_TEXT_BYTES = 8 << 20
BYTES_PER_TOKEN = 8


@dataclass(frozen=True, kw_only=True)
class FrontendSpec:
    """Configuration of a role session. `extra_info`: for /server_info, no secrets.

    `switch`: None for a fixed role. `secret`: authenticates the router. `warms_up`: compute a
    request first.
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
    """The services of all routes.

    `server_info`: flat, no secrets. `dead`: why the engine cannot serve, if so. `others`:
    additional frontends, in the main one. `stamps`: liveness of processes. `beating`: heartbeat
    streams. `images`: of a multimodal model.
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
    tokenizing: Aside = field(
        default_factory=lambda: Aside("tokenize", inline=INLINE_CHARS, huge=HUGE_CHARS, threads=2)
    )
    rendering: Aside = field(default_factory=lambda: Aside("render", inline=64 << 10, huge=1 << 20))
    started_unix_s: int = field(default_factory=lambda: int(time.time()))
    warm: asyncio.Event = field(default_factory=asyncio.Event)  # ready and warmed up
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
        """Max prompt plus answer: the model's context or the KV cache."""
        kv = self.leaders.kv_tokens
        return self.model.context_length if kv is None else min(self.model.context_length, kv)

    @property
    def max_text_bytes(self) -> int:
        """Max bytes of a text."""
        return max(MAX_TEXT_BYTES, BYTES_PER_TOKEN * self.context_length)

    def check_text_bytes(self, num_bytes: int, *, field: str) -> None:
        """Raises ApiError(400)."""
        if num_bytes > self.max_text_bytes:
            most = f"at most {self.max_text_bytes} are tokenized"
            raise bad_field(field, f"has {num_bytes} bytes of text; {most}; shorten it")

    def close(self) -> None:
        self.tokenizing.close()
        self.rendering.close()
        self.tracer.close()

    def timeout_of(self, request: web.BaseRequest) -> float | None:
        return request_timeout_s(request.headers)

    async def encode_all(
        self, texts: Iterable[str], *, field: str, add_special_tokens: bool = True, most: int | None = None
    ) -> list[list[int]]:
        """Tokenize texts, long or many in threads. Raises ApiError(400) naming `field`.

        Raises TooManyTokens above `most`, before tokenizing if the length suffices.
        """
        found, num_tokens = list[list[int]](), 0
        for group in _groups(texts):
            work = partial(self._encode_group, group, field=field, add_special_tokens=add_special_tokens, most=most)
            try:
                found += await self.tokenizing.run(work, size=sum(map(len, group)))
            except ValueError as e:
                raise bad_field(field, str(e)) from None
            num_tokens += sum(map(len, found[-len(group) :]))
            if num_tokens > MAX_VALUES:
                raise bad_field(field, f"one request may hold at most {MAX_VALUES} tokens of text; send fewer texts")
        return found

    def _encode_group(
        self, texts: list[str], *, field: str, add_special_tokens: bool, most: int | None
    ) -> list[list[int]]:
        encode = self.model.tokenizer.encode
        for text in texts:
            self._check_length(text, field=field, most=most)
        return [encode(text, add_special_tokens=add_special_tokens, most=most) for text in texts]

    def _check_length(self, text: str, *, field: str, most: int | None) -> None:
        """Raises TooManyTokens, or ApiError(400) for a text too long to tokenize."""
        if most is not None:
            self.model.tokenizer.check_length(text, most)
        if len(text) * 4 > self.max_text_bytes:
            self.check_text_bytes(len(text.encode(errors="surrogatepass")), field=field)

    async def decode_all(self, lists: Sequence[list[int]], *, skip_special_tokens: bool) -> list[str]:
        decode, size = self.model.tokenizer.decode, sum(map(len, lists))
        return await self.tokenizing.run(
            lambda: [decode(ids, skip_special_tokens=skip_special_tokens) for ids in lists], size=size
        )

    def bootstraps_of(
        self, request: web.BaseRequest, fields: BootstrapFields, *, num_prompts: int, n: int
    ) -> list[Bootstrap | None]:
        """Raises ApiError(400)."""
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
        """A room for fake transfers, never 0."""
        return self.prng.randrange(1, 2**63)

    def mint_id(self, prefix: str) -> str:
        """Unique among workers, and unguessable, because clients abort by it."""
        return prefix + secrets.token_hex(16)

    def samples_of(self, params: SamplingParams) -> list[SamplingParams]:
        """n samples with consecutive seeds."""
        first = self.prng.getrandbits(62) if params.seed is None else params.seed
        return [msgspec.structs.replace(params, n=1, seed=_int64(first + j)) for j in range(params.n)]


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    group, size = list[str](), 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= GROUP_CHARS:
            yield group
            group, size = [], 0
    if group:
        yield group


def request_timeout_s(headers: Mapping[str, str]) -> float | None:
    """Raises ApiError(400) for a bad header."""
    for name in UNITS_S:
        text = headers.get(name)
        if text is None:
            continue
        value_s = seconds_of(text, name)
        if value_s is None:
            raise ApiError(400, f"{name}: must be a number greater than 0, got {text[:40]!r}", field=name)
        return value_s
    return None


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


SERVICES: web.RequestKey[Services] = web.RequestKey("services", Services)


# ---- Builds the services of a role session.


@dataclass(frozen=True, kw_only=True)
class FrontendSlot:
    """A frontend among those of its worker. `others`, `stamps`: in the main one."""

    row: int = MAIN_FRONTEND
    shared: SharedRequests | None = None
    others: OtherFrontends | None = None
    stamps: Stamps | None = None


def make_services(
    spec: FrontendSpec,
    *,
    leaders: Leaders,
    gate: KeyGate,
    dead: Callable[[], str | None],
    slot: FrontendSlot,
) -> Services:
    """Load tokenizer and templates. Raises ConfigError."""
    server, engine = spec.server, spec.engine
    model = load_served_model(engine, mode=spec.mode)
    adapters = named_paths(engine.lora_paths)
    if taken := set(model.own_names) & adapters.keys():
        raise ConfigError(f"--lora-paths: {min(taken)!r} is a name of the model itself; choose another")
    leaders.begin_with(model_path=model.path, weight_version=engine.weight_version, adapters=adapters)
    metrics = Metrics(model_name=model.served_name, mode=spec.mode)
    process = "unified" if spec.mode == "null" else spec.mode
    exporter = open_exporter(enable=server.enable_trace, endpoint=server.otlp_traces_endpoint, process=process)
    tracer = Tracer(exporter=exporter)
    client = EngineClient(
        leaders,
        open_text=_open_text(model.loaded_tokenizer),
        observer=metrics,
        max_running=engine.max_running_requests,
        max_queued=engine.max_queued_requests,
        early_rejection=server.enable_early_rejection and spec.mode != "decode",  # there the wait is prefill's
        traces=Traces(tracer, process=process, model=model.served_name),
        shared=slot.shared,
        policy=_policy(spec, first=slot.row),
    )
    kept = StreamLogs()
    metrics.show_kept(kept)
    return Services(
        spec=spec,
        model=model,
        server_info=_server_info(spec),
        dead=dead,
        client=client,
        metrics=metrics,
        tracer=tracer,
        gate=gate,
        browser=BrowserRule(
            host=server.host,
            has_keys=gate.is_set,
            allowed_hosts=server.allowed_hosts,
            allowed_origins=server.allowed_origins,
        ),
        prng=random.Random(engine.random_seed if slot.row == MAIN_FRONTEND else f"{engine.random_seed}/{slot.row}"),
        responses=_responses(spec) if slot.row == MAIN_FRONTEND else None,
        images=None if model.vision is None else _images(spec.server, model.vision),
        others=slot.others,
        stamps=slot.stamps,
        kept=kept,
    )


def _images(server: ServerConfig, vision: VisionConfig) -> "ImageLoader":
    """Imports Pillow only for multimodal models."""
    from engine.frontend.images.loader import ImageLoader
    from engine.frontend.images.pixels import PixelMaker

    maker = PixelMaker(vision)
    return ImageLoader(maker, server, most_bytes=server.max_body_bytes)


def _open_text(tokenizer: Tokenizer | None) -> Callable[[GenerateRequest], TextReader]:
    return (lambda request: SampleIds()) if tokenizer is None else partial(SampleText, tokenizer)


def _policy(spec: FrontendSpec, *, first: int) -> RankPolicy:
    """Frontends start round robin at different ranks."""
    rule = rule_of(spec.server.load_balance_method, mode=spec.mode)
    is_fixed = rule is Rule.ROOM and spec.mode == "prefill"
    return RankPolicy(rule, num_ranks=spec.engine.dp_size, is_fixed=is_fixed, first=first)


def _responses(spec: FrontendSpec) -> LocalBook | None:
    """In a cluster the router has the store."""
    server = spec.server
    if spec.mode != "null" or server.max_stored_responses == 0:
        return None
    return LocalBook(ResponseStore(max_count=server.max_stored_responses))


def limits_of(server: ServerConfig) -> RequestLimits:
    return RequestLimits(max_body_bytes=server.max_body_bytes, size_flag="--max-body-bytes")


def open_worker_gate(server: ServerConfig) -> KeyGate:
    return open_gate(
        api_key=server.api_key,
        api_key_file=server.api_key_file,
        admin_api_key=server.admin_api_key,
        admin_api_key_file=server.admin_api_key_file,
    )


def _server_info(spec: FrontendSpec) -> dict[str, Any]:
    flags = {**values_by_name(spec.server), **values_by_name(spec.engine)}
    info = {**flags, **spec.extra_info}
    return {name: value for name, value in info.items() if "api_key" not in name and "secret" not in name}
