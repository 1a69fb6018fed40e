"""Faults: each kind one method, called at moments that the seed draws. What is broken here is mended by time or by `heal`.

Failed, slow and late transfers are the engine's (transfer_engine.py); they need no call.
"""

from collections.abc import Callable

from engine.messages import ContinueGeneration, PauseGeneration, UpdateWeights
from router.pool.worker import Role
from tools.simulation.cluster import Cluster, Node
from tools.simulation.ending import ending_of
from tools.simulation.hostile import Hostile
from tools.simulation.http import Call, call
from tools.simulation.workers.weights import BROKEN, OTHER, OWN
from tools.simulation.workers.worker import Worker
from tools.simulation.world import Process

FAST_RESTART_S = (0.001, 0.1)
SLOW_RESTART_S = (0.5, 2.0)
JUMPS_S = (0.02, 0.05, 0.2, 0.5, 2.0, 10.0)


class Faults:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._draw = cluster.world.rng("faults")
        self._active = True
        self._sender = Process(cluster.world, node="x0", life=1, skew_s=0.0)
        self._hostile = Hostile(cluster, self._sender)
        self._acts_on: dict[str, Callable[[str], None]] = {
            "kill": self._kill,
            "drain": self._drain,
            "freeze": self._freeze,
        }
        self._acts: dict[str, Callable[[], None]] = {
            "partition": self._partition,
            "one-way partition": self._one_way,
            "clog": self._clog,
            "connection reset": self._reset,
            "cut encode": self._cut_encoder,
            "freeze": self._freeze,
            "clock jump": self._jump,
            "client disconnect": self._leave,
            "duplicate request": self._repeat,
            "memory pressure": self._burst,
            "hostile peer": self._hostile.act,
            "pause generation": self._pause,
            "update weights": self._update,
            "kill rank": self._kill_rank,
            "migrate": self._migrate,
            "broken stream": self._break_stream,
        }

    def begin(self) -> None:
        if self._cluster.options.faults:
            self._next()

    def _next(self) -> None:
        self._world.after(self._draw.expovariate(1 / self._cluster.options.fault_every_s), "fault", self._strike)

    def _strike(self) -> None:
        if self._active:
            self.inject(self._draw.choice(self._cluster.options.faults))
            self._next()

    def inject(self, kind: str) -> None:
        """One fault now."""
        self._world.note(f"fault: {kind}")
        act, _, node = kind.partition(" ")
        self._acts[kind]() if kind in self._acts else self._acts_on[act](node)

    def heal(self) -> None:
        """Nothing is broken any more, everybody is up."""
        self._active = False
        self._cluster.network.heal()
        for node in self._cluster.nodes.values():
            if node.process is not None:
                self._thaw(node.process)
            self._restart(node)
        for worker in self._cluster.workers():
            worker.managers.stop_faults()
            worker.to_scheduler(ContinueGeneration("sim"))
        self._sender.kill()

    def _count(self, kind: str) -> None:
        self._world.injected[kind] += 1

    def _some(self, *kinds: str) -> Node | None:
        nodes = [n for n in self._cluster.nodes.values() if n.alive and (not kinds or n.kind in kinds)]
        return self._draw.choice(nodes) if nodes else None

    def _busy(self, kind: str) -> Node | None:
        """A worker with transfers under way, where death matters most."""
        nodes = [n for n in self._cluster.nodes.values() if n.alive and n.kind == kind]
        busy = [n for n in nodes if n.worker is not None and n.worker.managers.under_way]
        return self._draw.choice(busy) if busy else None

    def _pair(self) -> tuple[str, str]:
        first, second = self._draw.sample([*self._cluster.nodes, "c0"], 2)
        return first, second

    def _for(self, low_s: float, high_s: float, act: Callable[[], None], label: str) -> None:
        self._world.after(self._draw.uniform(low_s, high_s), label, act)

    # ---- network

    def _partition(self) -> None:
        a, b = self._pair()
        self._cut({(a, b), (b, a)})
        self._count("partition")

    def _one_way(self) -> None:
        self._cut({self._pair()})
        self._count("one-way partition")

    def _cut_encoder(self) -> None:
        """From a prefill worker, in one direction or in both."""
        encoder, prefill = self._some("encode"), self._some("prefill")
        if encoder is None or prefill is None:
            return
        there, back = (encoder.name, prefill.name), (prefill.name, encoder.name)
        self._cut(self._draw.choice([{there}, {back}, {there, back}]))
        self._count("cut encode")

    def _cut(self, ways: set[tuple[str, str]]) -> None:
        network = self._cluster.network
        network.block(ways)
        if self._draw.random() < 0.3:  # and the connections are dropped by something in between
            for a, b in sorted(ways):
                network.reset_between(a, b)
        self._for(0.05, self._draw.choice([0.5, 2.0, 5.0]), lambda: network.unblock(ways), "mended")

    def _clog(self) -> None:
        pair, network = self._pair(), self._cluster.network
        network.clog(pair, self._draw.choice([0.05, 0.3, 1.0]))
        self._for(0.5, 4.0, lambda: network.unclog(pair), "unclogged")
        self._count("clogged link")

    def _reset(self) -> None:
        """One connection, or all between two nodes."""
        pipes = self._cluster.network.pipes
        if not pipes:
            return
        pipe = self._draw.choice(pipes)
        nodes = sorted(end.process.node for end in pipe.ends)
        if len(nodes) == 2 and self._draw.random() < 0.5:
            self._cluster.network.reset_between(nodes[0], nodes[1])
        else:
            pipe.cut()
        self._count("connection reset")

    # ---- processes

    def _kill(self, kind: str) -> None:
        node = self._busy(kind) or self._some(kind)
        if node is None:
            return
        fast = self._draw.random() < 0.5
        self._cluster.kill(node)
        self._restart_later(node, FAST_RESTART_S if fast else SLOW_RESTART_S)
        self._count(f"kill {kind}, {'fast' if fast else 'slow'} restart")

    def _kill_rank(self) -> None:
        """A follower dies, and its worker with it; they come back together."""
        kind = self._draw.choice(["prefill", "decode"])
        node = self._busy(kind) or self._some(kind)
        if node is None or node.process is None or node.worker is None or not node.worker.computer.followers:
            return
        node.process.on_death.append(lambda: self._restart_later(node))
        self._draw.choice(node.worker.computer.followers).kill()
        self._count("kill rank")

    def _restart_later(self, node: Node, within_s: tuple[float, float] = SLOW_RESTART_S) -> None:
        self._for(*within_s, lambda: self._restart(node), f"restart {node.name}")

    def _restart(self, node: Node) -> None:
        if not node.alive:
            self._cluster.start(node)
            if not self._active and node.worker is not None:
                node.worker.managers.stop_faults()

    def _drain(self, kind: str) -> None:
        """SIGTERM, and now and then a second one; who has ended comes back later."""
        node = self._busy(kind) or self._some(kind)
        if node is None or node.process is None or node.part is None:
            return
        process, options = node.process, self._cluster.options
        ending = ending_of(node.part, timeout_s=options.drain_timeout_s)
        process.on_death.append(lambda: self._restart_later(node))
        process.after(0, "SIGTERM", ending.sigterm)
        if self._draw.random() < 0.3:
            process.after(self._draw.uniform(0, options.drain_timeout_s), "SIGTERM again", ending.sigterm)
        self._count(f"drain {kind}")

    def _migrate(self, tries: int = 100) -> None:
        """As POST /workers/migrate of the router, at a worker that streams; until there is one, up to `tries` times."""
        routers = [r for r in self._cluster.routers() if not r.process.frozen]
        if not routers or not self._active:
            return
        router = routers[0] if len(routers) == 1 else self._draw.choice(routers)
        workers = [w for w in router.table.workers() if w.role is Role.DECODE and router.table.has_others(w)]
        busy = [w for w in workers if any(call.continuable for call in w.calls)]
        if busy:
            worker = self._draw.choice(busy)
            router.aio.run(lambda: router.monitor.move_calls(worker, "an operator wants it"))
            self._count("migrate")
        elif tries:
            self._world.after(0.02, "migrate", self._migrate, tries - 1)

    def _freeze(self, *kinds: str) -> None:
        node = self._some(*kinds)
        if node is None or node.process is None or node.process.frozen:
            return
        process = node.process
        process.freeze()
        self._for(0.05, self._draw.choice([0.3, 1.0, 5.0]), lambda: self._thaw(process), f"thaw {node.name}")
        self._count(f"freeze {node.kind}")

    def _thaw(self, process: Process) -> None:
        if process.alive and process.frozen:
            process.thaw()

    def _jump(self) -> None:
        """A monotonic clock only jumps forward: the machine slept, or was stopped by its hypervisor."""
        node = self._some()
        if node is None or node.process is None:
            return
        node.skew_s += self._draw.choice(JUMPS_S)
        node.process.skew_s = node.skew_s
        self._count("clock jump")

    def _pause(self) -> None:
        node = self._some("prefill", "decode", "encode")
        if node is None or (worker := node.worker) is None:
            return
        worker.to_scheduler(PauseGeneration("sim", self._draw.choice(["abort", "retract", "in_place"])))
        self._for(0.05, 2.0, lambda: self._continue(worker), f"continue {node.name}")
        self._count("pause generation")

    def _update(self) -> None:
        node = self._some("prefill", "decode", "encode")
        if node is None or node.worker is None:
            return
        path = BROKEN if self._draw.random() < 0.2 else self._weights()
        version, abort_all = str(self._world.num_events), self._draw.random() < 0.3
        node.worker.to_scheduler(UpdateWeights("sim", path, version, abort_all))
        self._count("update weights")

    def _weights(self) -> str:
        """Workers that exchange features have the same now and then."""
        return self._draw.choice([OWN, OTHER]) if self._cluster.options.num_encode else OTHER

    def _continue(self, worker: Worker) -> None:
        if worker.process.alive:
            worker.to_scheduler(ContinueGeneration("sim"))

    # ---- clients

    def _leave(self) -> None:
        number = self._cluster.clients.pick()
        if number is not None:
            self._cluster.clients.leave(number)
            self._count("client disconnect")

    def _break_stream(self, tries: int = 100) -> None:
        """The first stream of which its client has something; until there is one, up to `tries` times."""
        number = self._cluster.clients.pick_begun()
        if number is not None:
            self._cluster.clients.lose_connection(number)
            self._count("broken stream")
        elif tries and self._active:
            self._world.after(0.02, "break a stream", self._break_stream, tries - 1)

    def _repeat(self) -> None:
        """A body that a worker got comes once more: to it, or to another worker of its kind."""
        if not self._cluster.posts:
            return
        address, request = self._draw.choice(list(self._cluster.posts))
        if self._draw.random() < 0.3:
            kind = self._cluster.nodes[address.partition(":")[0]].kind
            other = self._some(kind)
            address = address if other is None else f"{other.name}:80"
        again = call(self._cluster.network, self._sender, address, request, Call())
        if self._draw.random() < 0.5:
            self._for(0.0, 2.0, again.cancel, "repeated request given up")
        self._count("duplicate request")

    def _burst(self) -> None:
        for _ in range(6):
            self._cluster.clients.ask(big=True, capacity=self._cluster.capacity)
        self._count("memory pressure")
