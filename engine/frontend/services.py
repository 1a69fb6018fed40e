"""Services of all handlers, built per role session; API-independent."""

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.frontend.client.engine_client import EngineClient
from engine.frontend.client.leaders import Leaders
from engine.frontend.client.other_frontends import OtherFrontends
from engine.frontend.errors import IgnoredFields
from engine.frontend.metrics.worker import Metrics
from engine.frontend.served_model import ServedModel, Texts
from engine.frontend.spec import FrontendSpec
from engine.stamps import Stamps
from service.http.reconnect import StreamLogs
from service.http.request import RequestKey
from service.responses.store import LocalBook
from service.security.browser import BrowserRule
from service.security.keys import KeyGate
from service.telemetry.context import Tracer
from service.waiter import Pauses

if TYPE_CHECKING:
    from engine.frontend.images.loader import ImageLoader


@dataclass(frozen=True, kw_only=True)
class Services:
    """`server_info`: flat, no secrets. `dead`: why the engine cannot serve, if so. `others`:
    additional frontends, in the main one. `stamps`: liveness of processes. `beating`: heartbeat
    streams. `images`: of a multimodal model.
    """

    spec: FrontendSpec
    model: ServedModel
    texts: Texts
    server_info: Mapping[str, Any]
    dead: Callable[[], str | None]
    client: EngineClient
    metrics: Metrics
    tracer: Tracer
    gate: KeyGate
    browser: BrowserRule
    prng: random.Random
    responses: LocalBook | None
    others: OtherFrontends
    stamps: Stamps
    images: "ImageLoader | None" = None
    beating: Pauses = field(default_factory=Pauses)
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
        return context_length_of(self.model, self.leaders)

    def close(self) -> None:
        self.texts.close()
        self.tracer.close()

    def mint_room(self) -> int:
        """A room for fake transfers, never 0."""
        return self.prng.randrange(1, 2**63)

    def mint_id(self, prefix: str) -> str:
        """Unique among workers, and unguessable, because clients abort by it."""
        return prefix + secrets.token_hex(16)


def context_length_of(model: ServedModel, leaders: Leaders) -> int:
    kv = leaders.kv_tokens
    return model.context_length if kv is None else min(model.context_length, kv)


SERVICES: RequestKey[Services] = RequestKey("services", Services)
