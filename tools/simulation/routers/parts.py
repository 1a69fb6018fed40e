"""Production parts of one life of the router, over a simulated session and network."""

from collections import Counter
from typing import Any

from router.attempts.pair_attempt import AttemptLauncher, RoomMinter
from router.choice.policies import make_chooser
from router.client.credentials import Credentials
from router.compose.dispatcher import Owners, make_dispatcher
from router.compose.events import make_events
from router.config import RouterConfig
from router.history.metrics import RouterMetrics
from router.history.recorder import Recorder, RequestTraces
from router.parts.admission import Admission
from router.parts.encoders import Encoders
from router.parts.failover import MoveOrders
from router.pool.health import HealthMonitor
from router.pool.workers import WorkerTable
from router.requests.dispatch import LiveRequests
from service.security.keys import open_gate
from service.telemetry.context import Tracer
from tools.simulation.aio import VirtualLoop
from tools.simulation.network import Network
from tools.simulation.options import SECRET, Options
from tools.simulation.routers.upstream import SimulatedSession, SimulatedUpstream
from tools.simulation.world import Process


class RouterParts:
    """Dispatcher, race, legs, worker table, health monitor, and what they share."""

    def __init__(self, *, network: Network, process: Process, aio: VirtualLoop, options: Options) -> None:
        draw = network.world.rng(f"router/{process.name}")
        config = self.config = _config_of(options)
        chooser = make_chooser(config, draw=draw.randrange)
        self.table = WorkerTable(on_gone=chooser.forget)
        encoders = Encoders(table=self.table, secret=SECRET)
        self.rooms = RoomMinter(draw.getrandbits)
        self.upstream = SimulatedUpstream(
            network=network, process=process, aio=aio, request_timeout_s=config.request_timeout_s
        )
        session: Any = SimulatedSession(self.upstream)
        metrics = self.metrics = RouterMetrics(self.table)
        failovers: Any = _Counted(network.world.seen, "failovers")
        metrics.failovers = failovers
        self.gate = open_gate(api_key=None, api_key_file=None, admin_api_key=None, admin_api_key_file=None)
        credentials = Credentials(api=self.gate.api)
        self.live = LiveRequests()
        self.moves = MoveOrders(session, credentials, secret=SECRET)
        self.monitor = HealthMonitor(
            config=config,
            table=self.table,
            session=session,
            credentials=credentials,
            upstream=self.upstream if options.heartbeats else None,
            let_go=self.moves.let_go,
            on_info=encoders.on_info,
        )
        admission, recorder = Admission(config), Recorder(aio.time)
        traces = RequestTraces(Tracer(ring_size=0), recorder)
        forecast = admission.forecast
        launcher = AttemptLauncher(
            table=self.table,
            rooms=self.rooms,
            upstream=self.upstream,
            events=make_events(
                traces=traces,
                recorder=recorder,
                metrics=metrics,
                forecast=forecast,
                monitor=self.monitor,
                conversations=(),
            ),
            secret=SECRET,
            clock=aio.time,
        )
        owners = Owners(
            admission=admission,
            encoders=encoders,
            book=None,
            live=self.live,
            credentials=credentials,
            session=session,
        )
        self.dispatcher = make_dispatcher(config, owners, launcher, chooser)


def _config_of(options: Options) -> RouterConfig:
    return RouterConfig(
        pd_disaggregation=True,
        policy=options.policy,
        retry_max=options.retry_max,
        health_check_interval_s=0.5,
        health_check_timeout_s=1.0,
        health_silence_s=options.silence_s,
        load_poll_interval_s=1.0,
        request_timeout_s=60.0,
        sse_keep_alive_interval_s=1.0,
        max_concurrent_requests=options.max_concurrent,
        resume_window_s=options.resume_window_s,
    )


class _Counted:
    """A metric of that name: what it counts by its last label is seen by the whole run, whatever becomes of the router."""

    def __init__(self, seen: Counter[str], name: str) -> None:
        self._seen = seen
        self._name = name

    def labels(self, *values: str) -> "_Counted":
        return _Counted(self._seen, f"{self._name} {values[-1]}")

    def inc(self) -> None:
        self._seen[self._name] += 1
