"""What a worker exchanges with its peers: the role over its managers, as disagg/compose.py makes it, and what its parts transfer."""

from functools import partial
from typing import Any

import msgspec

from bootstrap_server.client import Registrar
from disagg.assembly import RECEIVES, SENDS, Transfers
from disagg.decode_role import DecodeRole
from disagg.features.feature_fetching import FeatureFetch, FeatureFetches
from disagg.features.feature_serving import EncodeRole
from disagg.features.prefix_fetching import PrefixFetch, PrefixFetches
from disagg.incoming import IncomingTransfer
from disagg.outgoing import PrefillHandover
from disagg.prefill_role import PrefillRole
from disagg.registration import RouteFinder
from disagg.role import PeerPart, SendingPart
from engine.messages import KVSource
from tools.simulation.bootstrap import SimBootstrap, send_over, start_registrar
from tools.simulation.surroundings import SLOT_BYTES, Surroundings, layer_groups
from tools.simulation.workers.computing import Computer
from tools.simulation.workers.features import Arrivals
from tools.simulation.workers.managers import CONTROL, PREFIX_CONTROL, SENDER_CONTROL, Managers
from tools.simulation.workers.weights import SimWeights
from tools.simulation.world import Process, Threads

MOVE_TIMEOUT_S = 4.0  # production: 30
BOOTSTRAP_PORT = 8998
Role = PrefillRole | DecodeRole | EncodeRole


class Exchange:
    """The role "prefill", "decode" or "encode" of a worker, over the scheduler and memory of its `computer`."""

    def __init__(
        self,
        around: Surroundings,
        process: Process,
        threads: Threads,
        computer: Computer,
        managers: Managers,
        weights: SimWeights,
        name: str,
    ) -> None:
        self.bootstrap: SimBootstrap | None = None
        self.registrar: Registrar | None = None
        self.arrivals: Arrivals | None = None
        self._around, self._process, self._threads = around, process, threads
        self._computer, self._managers, self._weights = computer, managers, weights
        self._send = send_over(around.bootstrap_of, partial(around.reach, process.node))
        self.role: Role = {"prefill": self._prefill, "decode": self._decode, "encode": self._encode}[name]()
        if (named := self.role.info().get("prefix_source")) is not None:
            at = msgspec.json.decode(named)
            around.prefix_sources[process.node] = KVSource(at["control"], at["incarnation"])

    def _encode(self) -> EncodeRole:
        return self._transfers({SENDS: CONTROL}).encode(self._computer.bounds)

    def _decode(self) -> DecodeRole:
        options = self._around.options
        return self._transfers({RECEIVES: CONTROL, SENDS: SENDER_CONTROL}).decode(
            RouteFinder(secret=None, clock=self._process.clock, send=self._send).find,
            move_timeout_s=MOVE_TIMEOUT_S,
            prealloc_timeout_s=options.prealloc_timeout_s,
            token_bytes=SLOT_BYTES if options.prefix_fetch and options.prefixes_of_decode else None,
        )

    def _prefill(self) -> PrefillRole:
        executor, fetches = self._computer.executor, self._around.options.prefix_fetch
        transfers = self._transfers({SENDS: CONTROL, **({RECEIVES: PREFIX_CONTROL} if fetches else {})})
        by_layer = executor.layers > 1
        sends = transfers.sends(layer_groups(transfers.args, executor.layers), layers=executor if by_layer else None)
        executor.wake = sends.on_mark
        parts: list[PeerPart] = []
        if fetches:
            parts += transfers.prefixes(sends, token_bytes=SLOT_BYTES)
        if self._around.options.num_encode:
            parts.append(self._features())
        process, server = self._process, self._around.shared_bootstrap
        if server is None:
            server, self.bootstrap = f"{process.node}:{BOOTSTRAP_PORT}", SimBootstrap(process, shared=False)
        registrar = self.registrar = start_registrar(
            server, sends, transfers.args, process=process, threads=self._threads, send=self._send
        )
        return transfers.role.prefill(sends, registrar, parts, bounds=self._computer.bounds, layerwise=by_layer)

    def _features(self) -> FeatureFetches:
        """Of an engine and memory of their own."""
        options, models = self._around.options, self._computer.models
        arrivals = self.arrivals = Arrivals(
            self._process, options, weights_of=self._weights.number, num_ranks=len(models)
        )
        for model in models:
            model.arrived = arrivals.features_of
        transfers = self._managers.of_features(self._computer.scheduler, arrivals.memory)
        return transfers.features(arrivals.allocator, timeout_s=options.feature_timeout_s)

    def _transfers(self, names: dict[str, str]) -> Transfers:
        """`names`: of control threads."""
        computer = self._computer
        return self._managers.of_pages(computer.scheduler, computer.memory, names, followers=computer.followers)

    # ---- what crosses now

    def transfers_in(self, *, features: bool) -> list[IncomingTransfer]:
        """To this worker: of features, or of KV."""
        kinds = (FeatureFetches,) if features else (DecodeRole, PrefixFetches)
        owners: list[Any] = [one for one in (self.role, *self.role.parts) if isinstance(one, kinds)]
        return [transfer for owner in owners for transfer in owner.incoming.transfers.values()]

    def fetches(self) -> list[FeatureFetch | PrefixFetch]:
        """What requests of this worker wait for."""
        crossing = self.transfers_in(features=False) + self.transfers_in(features=True)
        return [transfer for transfer in crossing if isinstance(transfer, FeatureFetch | PrefixFetch)]

    def handovers_out(self) -> list[PrefillHandover]:
        own = [self.role._prompts] if isinstance(self.role, PrefillRole) else []
        of_parts = [part._outgoing for part in self.role.parts if isinstance(part, SendingPart)]
        return [handover for outgoing in (*own, *of_parts) for handover in outgoing.handovers.values()]
