"""The parts of a router process that need no worker."""

import random
import secrets
import time
from contextlib import AsyncExitStack
from functools import partial

from router.attempts.pair_attempt import RoomMinter
from router.choice.kv_feed import KVEventFeed
from router.choice.policies import make_chooser
from router.compose.exposure import check_exposure, check_secret, make_credentials, named_workers, ways_of
from router.config import RouterConfig
from router.fleet import PeerProcesses, ProcessSlot
from router.history.metrics import RouterMetrics, of_feed
from router.history.recorder import Recorder
from router.parts.admission import Admission
from router.parts.encoders import Encoders
from router.parts.prefix import PrefixHeaders
from router.pool.reports import Info, parse_prefix_holder, parse_store
from router.pool.shared_load import SharedLoad
from router.pool.worker import Worker
from router.requests.dispatch import LiveRequests
from router.requests.responses import of_store, store_of
from service.security.keys import router_secret
from service.telemetry.context import Tracer
from service.telemetry.exporters import open_exporter


class RouterCore:
    """Parts of a router process, `slot` of several. `prefixes` is None without secret or index."""

    def __init__(self, config: RouterConfig, slot: ProcessSlot | None, stack: AsyncExitStack) -> None:
        """Raises ConfigError."""
        self.config, self.slot = config, slot
        cluster_secret, self.gate = check_exposure(config)
        self.secret = router_secret(cluster_secret)
        check_secret(config, self.secret)
        self.credentials = make_credentials(config, self.gate)
        self.rooms = RoomMinter()
        self.live = LiveRequests()
        peer_load = None if slot is None else SharedLoad(slot.load_file, row=slot.row, num_rows=slot.num_rows)
        self.peers = PeerProcesses(slot)
        stack.push_async_callback(self.peers.close)
        exporter = open_exporter(enable=config.enable_trace, endpoint=config.otlp_traces_endpoint, process="router")
        self.tracer = Tracer(exporter=exporter)
        stack.callback(self.tracer.close)
        self.recorder = Recorder(time.monotonic, place=0 if slot is None else slot.row)
        self.chooser = make_chooser(config, draw=random.Random(secrets.randbits(64)).randrange)
        self.feed = KVEventFeed(chooser=self.chooser, secret=cluster_secret, enabled=not config.disable_kv_events)
        stack.push_async_callback(self.feed.close)
        self.admission = Admission(config, peers=peer_load)
        self.table = named_workers(config, peer_load)
        self.table.on_gone = self._on_gone
        self.prefixes: PrefixHeaders | None = None
        if self.chooser.index is not None and self.secret is not None:
            self.prefixes = PrefixHeaders(worker_of=self.table.get, secret=self.secret)
        self.encoders = Encoders(table=self.table, secret=self.secret)
        self.responses = store_of(config)
        self.metrics = RouterMetrics(self.table, ways=ways_of(config))
        self.metrics.parts += [partial(of_feed, self.feed), self.admission.metrics]
        self.metrics.parts += [] if self.responses is None else [partial(of_store, self.responses)]
        self.metrics.parts += [] if self.prefixes is None else [self.prefixes.metrics]
        self.metrics.parts += [self.encoders.metrics]

    def on_info(self, worker: Worker, info: Info) -> None:
        if self.chooser.index is not None:  # before the first event
            self.chooser.index.share(worker.worker_id, parse_store(info))
        self.feed.on_info(worker, info)
        self.encoders.on_info(worker, info)
        self.table.on_whole(worker, info.get("serves_whole") is True)
        worker.prefix = parse_prefix_holder(info) if self.prefixes else None

    def _on_gone(self, worker: Worker) -> None:
        self.feed.on_gone(worker)
        self.encoders.on_gone(worker)
        worker.prefix = None
        self.admission.forecast.forget(worker)
