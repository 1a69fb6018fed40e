"""Builds the services of a role session."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.frontend.client.dp_policy import RankPolicy, Rule, rule_of
from engine.frontend.client.engine_client import ClientLimits, EngineClient
from engine.frontend.client.generation import Traces
from engine.frontend.client.leaders import Leaders
from engine.frontend.client.scheduler_link import SchedulerLink, open_sockets
from engine.frontend.metrics.worker import Metrics
from engine.frontend.served_model import ServedModel, Texts, load_served_model
from engine.frontend.services import Services, context_length_of
from engine.frontend.spec import FrontendSlot, FrontendSpec
from engine.ipc import MAIN_FRONTEND, IpcPaths
from engine.lora.peft_config import named_paths
from engine.text.incremental import open_text
from service.flags import ConfigError, values_by_name
from service.http.reconnect import StreamLogs
from service.responses.store import LocalBook, ResponseStore
from service.security.browser import BrowserRule
from service.security.keys import KeyGate
from service.telemetry.context import Tracer
from service.telemetry.exporters import open_exporter

if TYPE_CHECKING:
    from engine.frontend.images.loader import ImageLoader


@contextmanager
def connected(
    spec: FrontendSpec, *, ipc: IpcPaths, dead: Callable[[], str | None], gate: KeyGate, slot: FrontendSlot
) -> Iterator[Services]:
    """Services that exchange messages with the schedulers, within the running loop.

    `dead`: names a dead process, if any. Raises ConfigError for an unusable checkpoint.
    """
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        row, ranks = slot.row, ipc.of_ranks(spec.engine.dp_size)
        sockets = [stack.enter_context(open_sockets(paths, row=row)) for paths in ranks]
        leaders = Leaders([SchedulerLink(send, loop.time, row=row) for send, _ in sockets])
        services = make_services(
            spec, leaders=leaders, gate=gate, dead=lambda: dead() or leaders.lost or slot.others.lost, slot=slot
        )
        for rank, (_, pull) in enumerate(sockets):
            pull.attach(loop, slot.others.informed(partial(services.client.on_message, rank=rank), rank))
        yield services


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
        open_text=open_text(model.loaded_tokenizer),
        observer=metrics,
        limits=ClientLimits(
            max_running=engine.max_running_requests,
            max_queued=engine.max_queued_requests,
            early_rejection=server.enable_early_rejection and spec.mode != "decode",  # there the wait is prefill's
        ),
        traces=Traces(tracer, process=process, model=model.served_name),
        shared=slot.shared,
        policy=_policy(spec, first=slot.row),
    )
    kept = StreamLogs()
    metrics.show_kept(kept)
    return Services(
        spec=spec,
        model=model,
        texts=Texts(model, context_length=partial(context_length_of, model, leaders)),
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
        images=_images(spec, model),
        others=slot.others,
        stamps=slot.stamps,
        kept=kept,
    )


def _images(spec: FrontendSpec, model: ServedModel) -> "ImageLoader | None":
    """Imports Pillow only for multimodal models."""
    if model.vision is None:
        return None
    from engine.frontend.images.loader import ImageLoader

    return ImageLoader(model.vision, spec.server, most_bytes=spec.server.max_body_bytes)


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


def _server_info(spec: FrontendSpec) -> dict[str, Any]:
    flags = {**values_by_name(spec.server), **values_by_name(spec.engine)}
    info = {**flags, **spec.extra_info, "serves_whole": spec.mode != "encode"}
    return {name: value for name, value in info.items() if "api_key" not in name and "secret" not in name}
