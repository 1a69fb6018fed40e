"""The main process of a worker: binds HTTP and the frontend's socket, serves, and ends in good order.

Must not know how the scheduler was started: it is told whether it lives.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine.config import EngineConfig, ServerConfig
from engine.frontend.app import make_handle
from engine.frontend.bootstrap_allowlist import BootstrapAllowlist
from engine.frontend.client.engine_client import EngineClient
from engine.frontend.client.scheduler_link import ENGINE_DEAD, SchedulerLink
from engine.frontend.client.tracing import Traces
from engine.frontend.draining import drain
from engine.frontend.errors import draining
from engine.frontend.metrics.worker import Metrics
from engine.frontend.role_switch import RoleSwitch, RoleSwitchState
from engine.frontend.services import ANY_MODEL, Services
from engine.ipc import IpcPaths, PeerStalled, PullSocket, PushSocket
from engine.lora.names import lora_enabled, named_paths
from engine.messages import GetStep, Shutdown, ToFrontend, ToScheduler
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config
from engine.sampling_params import InvalidParam, SamplingParams, check_sampling_params
from engine.text.chat_template import load_chat_template
from engine.text.sample import SampleText
from engine.text.tokenizer import load_tokenizer, read_json
from service.flags import ConfigError, values_by_name
from service.http.errors import ApiError
from service.http.listening import ListeningPort
from service.http.server import Limits, make_runner
from service.process.collector import spare_what_lives
from service.process.stop_signals import StopSignals
from service.security.browser import BrowserRule
from service.security.keys import Gate, open_gate
from service.telemetry.otlp import open_exporter
from service.telemetry.tracer import Tracer

DEFAULT_MODEL_NAME = "recall"  # the model that ships with Tandem
WATCH_INTERVAL_S = 0.1
HTTP_CLOSE_S = 1.0  # for answers that are being written when the server ends
SPARE_REQUESTS = 1024  # HTTP requests in progress beyond the samples that may be live
HEALTH_TIMEOUT_S = 20.0
DEFAULT_BOOTSTRAP_PORT = 8998


class WorkerDied(RuntimeError):
    """A process of the worker ended by itself; the text says which."""


async def run_frontend(
    *,
    server: ServerConfig,
    engine: EngineConfig,
    ipc: IpcPaths,
    mode: str = "null",
    extra_info: Mapping[str, Any] | None = None,
    default_bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT,
    signals: StopSignals,
    gate: Gate,
    port: ListeningPort,
    on_ready: Callable[[], None] = lambda: None,
    children_alive: Callable[[], str | None] = lambda: None,
    drain_s: float = 30.0,
    health_timeout_s: float = HEALTH_TIMEOUT_S,
    bootstrap_allowlist: BootstrapAllowlist | None = None,
    switch: RoleSwitch | None = None,
    end_engine: Callable[[], None] = lambda: None,
) -> RoleSwitchState | None:
    """Serve until SIGTERM (drain), SIGINT or a second signal (end at once), which come by `signals`: None. Or until
    `switch` is asked for: after a drain, what the next life is to be; then call it again with the same `port`.

    end_engine: called (in a thread) before HTTP closes for a switch, so that probes are answered until the next life can.
    on_ready: the scheduler said `SchedulerReady`.
    children_alive: None, or what died; then everything live fails with 503 and WorkerDied is raised.
    extra_info: shown flat by /server_info; no secrets. bootstrap_allowlist: bootstrap servers that requests may name (default: none is
    ever dialled by this worker). drain_s: how long running requests may go on after SIGTERM. switch: None: the role is for good.
    Raises ConfigError for a checkpoint that cannot be used, WorkerDied.
    """
    loop = asyncio.get_running_loop()
    with _sockets(ipc) as (push, heartbeat, pull):
        services = make_services(
            server=server,
            engine=engine,
            mode=mode,
            send=_sender(push, heartbeat),
            now_s=loop.time,
            dead=children_alive,
            extra_info=extra_info or {},
            default_bootstrap_port=default_bootstrap_port,
            health_timeout_s=health_timeout_s,
            gate=gate,
            bootstrap_allowlist=bootstrap_allowlist,
            switch=switch,
        )
        pull.attach(loop, services.client.on_message)
        async with _serving(services, server, port):
            try:
                asked = _Asked(signals, switch)
                await _until_over(services.client, asked, children_alive, on_ready=on_ready)
                await drain(
                    services.client,
                    signals=signals,
                    timeout_s=drain_s,
                    dead=children_alive,
                    switch_timeout_s=asked.switch_timeout_s(drain_s),
                )
                if (reason := children_alive()) is not None:
                    raise WorkerDied(reason)
                if asked.next_session() is None:
                    return None
                services.client.end(draining("the server is changing its role"))
                await asyncio.to_thread(end_engine)
                return asked.next_session()
            finally:
                services.tokenizer_pool.shutdown(wait=False, cancel_futures=True)
                services.tracer.close()


@contextmanager
def _sockets(ipc: IpcPaths) -> Iterator[tuple[PushSocket, PushSocket, PullSocket[ToFrontend]]]:
    """To the scheduler, which is told to end when the block has ended; to its heartbeat; and from both."""
    push, heartbeat = PushSocket(ipc.to_scheduler), PushSocket(ipc.to_heartbeat)
    pull: PullSocket[ToFrontend] = PullSocket(ipc.to_frontend, ToFrontend)
    try:
        yield push, heartbeat, pull
    finally:
        with suppress(PeerStalled):
            push.send(Shutdown())
        for socket in (push, heartbeat, pull):
            socket.close()


def make_services(
    *,
    server: ServerConfig,
    engine: EngineConfig,
    mode: str,
    send: Callable[[ToScheduler | GetStep], None],
    now_s: Callable[[], float],
    dead: Callable[[], str | None],
    extra_info: Mapping[str, Any],
    default_bootstrap_port: int,
    health_timeout_s: float,
    gate: Gate | None = None,
    bootstrap_allowlist: BootstrapAllowlist | None = None,
    switch: RoleSwitch | None = None,
) -> Services:
    """Load tokenizer, template and limits of the checkpoint. Raises ConfigError."""
    model_path = engine.model_path or DEFAULT_MODEL_PATH
    model = load_model_config(model_path)
    tokenizer = load_tokenizer(model_path)
    served_name = engine.served_model_name or _name_of(model_path)
    metrics = Metrics(model_name=served_name, mode=mode)
    context = engine.context_length or model.max_position_embeddings
    max_live = engine.max_running_requests + engine.max_queued_requests
    process = "unified" if mode == "null" else mode
    exporter = open_exporter(enable=server.enable_trace, endpoint=server.otlp_traces_endpoint, process=process)
    tracer = Tracer(ring_size=server.trace_ring, exporter=exporter)
    scheduler = SchedulerLink(send, now_s)
    scheduler.adapters = named_paths(engine)
    client = EngineClient(
        scheduler,
        open_text=partial(SampleText, tokenizer),
        observer=metrics,
        max_live=max_live,
        early_rejection=server.enable_early_rejection and mode != "decode",  # there the wait is for prefill
        traces=Traces(tracer, process=process, model=served_name),
    )
    gate = gate or open_worker_gate(server)
    if taken := {*ANY_MODEL, served_name, model_path} & scheduler.adapters.keys():
        raise ConfigError(f"--lora-paths: {min(taken)!r} is a name of the model itself; choose another")
    return Services(
        client=client,
        scheduler=scheduler,
        tokenizer=tokenizer,
        template=load_chat_template(model_path, config=tokenizer.config, special_tokens=tokenizer.special_tokens),
        metrics=metrics,
        model_path=model_path,
        served_name=served_name,
        mode=mode,
        vocab_size=model.vocab_size,
        model_context_length=context,
        default_bootstrap_port=default_bootstrap_port,
        sampling_defaults=load_sampling_defaults(model_path, vocab_size=model.vocab_size),
        server_info=_server_info(server, engine, extra_info),
        model_info={
            "model_path": model_path,
            "served_model_name": served_name,
            "tokenizer_path": model_path,
            "is_generation": True,
            "model_type": model.model_type,
            "architectures": [model.architecture],
            "weight_version": engine.weight_version,
            "disaggregation_mode": mode,
        },
        gate=gate,
        browser=BrowserRule(
            host=server.host,
            has_keys=gate.is_set,
            allowed_hosts=server.allowed_hosts,
            allowed_origins=server.allowed_origins,
        ),
        bootstrap_allowlist=bootstrap_allowlist or BootstrapAllowlist(),
        dead=dead,
        health_timeout_s=health_timeout_s,
        started_unix_s=int(time.time()),
        prng=random.Random(engine.random_seed),
        tool_call_parser=engine.tool_call_parser,
        return_hidden_states=engine.enable_return_hidden_states,
        embedding_pooling=engine.embedding_pooling,
        default_deadline_s=server.default_deadline_s,
        lora=lora_enabled(engine),
        tracer=tracer,
        switch=switch,
    )


def load_sampling_defaults(model_path: str, *, vocab_size: int) -> dict[str, float | int]:
    """What generation_config.json recommends; stands for what an OpenAI request leaves open (SGLang and vLLM do so)."""
    config = read_json(Path(model_path) / "generation_config.json")
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {n: config[n] for n in names if isinstance(config.get(n), int | float) and not isinstance(config[n], bool)}
    if "top_k" in values:
        values["top_k"] = int(values["top_k"]) or -1  # transformers writes 0 for "off"
    try:
        check_sampling_params(SamplingParams(**values), vocab_size=vocab_size)
    except InvalidParam as e:
        raise ConfigError(f"{model_path}/generation_config.json: {e}") from None
    return values


def _server_info(server: ServerConfig, engine: EngineConfig, extra: Mapping[str, Any]) -> dict[str, Any]:
    info = {**values_by_name(server), **values_by_name(engine), "tp_size": 1, "dp_size": 1, **extra}
    return {name: value for name, value in info.items() if "api_key" not in name and "secret" not in name}


def open_worker_gate(server: ServerConfig) -> Gate:
    """Raises ConfigError for a key or key file that cannot be used."""
    return open_gate(
        api_key=server.api_key,
        api_key_file=server.api_key_file,
        admin_api_key=server.admin_api_key,
        admin_api_key_file=server.admin_api_key_file,
    )


def _name_of(model_path: str) -> str:
    path = Path(model_path).resolve()
    return DEFAULT_MODEL_NAME if model_path == DEFAULT_MODEL_PATH else path.stem if path.is_file() else path.name


def _sender(push: PushSocket, heartbeat: PushSocket) -> Callable[[ToScheduler | GetStep], None]:
    def send(message: ToScheduler | GetStep) -> None:
        try:
            (heartbeat if isinstance(message, GetStep) else push).send(message)
        except PeerStalled as e:
            raise ApiError(503, str(e), code="engine_stalled", retry_after_s=1) from None

    return send


@asynccontextmanager
async def _serving(services: Services, server: ServerConfig, port: ListeningPort) -> AsyncIterator[None]:
    handle = make_handle(services, max_open=services.client.max_live + SPARE_REQUESTS)
    limits = Limits(max_body_bytes=server.max_body_bytes, size_flag="--max-body-bytes")
    runner = make_runner(handle, limits, shutdown_timeout_s=HTTP_CLOSE_S)
    await runner.setup()
    try:
        await port.serve(runner)
        yield
    finally:
        await runner.cleanup()


@dataclass(frozen=True)
class _Asked:
    """What ends a life: signals, which win, or a switch of its role."""

    signals: StopSignals
    switch: RoleSwitch | None

    @property
    def is_over(self) -> bool:
        return self.signals.asked.is_set() or (self.switch is not None and self.switch.to is not None)

    def next_session(self) -> RoleSwitchState | None:
        return None if self.switch is None or self.signals.asked.is_set() else self.switch.to

    def switch_timeout_s(self, default_s: float) -> float | None:
        """None: no switch was asked for."""
        if self.switch is None or self.switch.to is None:
            return None
        return default_s if self.switch.timeout_s is None else self.switch.timeout_s


async def _until_over(
    client: EngineClient,
    asked: _Asked,
    children_alive: Callable[[], str | None],
    *,
    on_ready: Callable[[], None],
) -> None:
    """Return when asked to end. Raises WorkerDied."""
    told = False
    while not asked.is_over:
        dead = children_alive()
        if dead is not None:
            client.fail_all(ApiError(503, dead, code=ENGINE_DEAD, retry_after_s=1))
            raise WorkerDied(dead)
        if client.scheduler.ready.is_set() and not told:
            told = True
            on_ready()
            spare_what_lives()
        with suppress(TimeoutError):
            await asyncio.wait_for(asked.signals.asked.wait(), WATCH_INTERVAL_S)
