"""A whole cluster in one thread: which nodes there are, the life of each process, and what must hold across them."""

from collections import deque
from dataclasses import dataclass, field

from router.pool.worker import Role
from tools.simulation.bootstrap import SimBootstrap
from tools.simulation.clients import Clients
from tools.simulation.http import Request
from tools.simulation.network import Network
from tools.simulation.notices import Notices
from tools.simulation.options import SECRET, Options
from tools.simulation.rest import leftovers
from tools.simulation.routers.router import Router
from tools.simulation.surroundings import Surroundings
from tools.simulation.workers.encoder import Encoder
from tools.simulation.workers.exchange import BOOTSTRAP_PORT
from tools.simulation.workers.worker import Worker
from tools.simulation.world import Event, Process, Violation, World
from transfer_backends.contract import TransferConfig

ALONE = f"b0:{BOOTSTRAP_PORT}"
ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "encode": Role.ENCODE}


@dataclass
class Node:
    """`kind`: "prefill" | "decode" | "encode" | "router" | "bootstrap". `process`: its present or last life."""

    name: str
    kind: str
    lives: int = 0
    process: Process | None = None
    part: Worker | Router | SimBootstrap | None = None
    skew_s: float = 0.0

    @property
    def worker(self) -> Worker | None:
        return self.part if isinstance(self.part, Worker) else None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive


@dataclass
class Cluster:
    world: World
    options: Options
    nodes: dict[str, Node] = field(default_factory=dict)
    all_workers: list[Worker] = field(default_factory=list)  # the dead included
    posts: deque[tuple[str, Request]] = field(default_factory=lambda: deque(maxlen=16))

    def __post_init__(self) -> None:
        options = self.options
        self.draw = self.world.rng("cluster")
        self.network = Network(self.world, options.delay_s)
        self.notices = Notices(self.world, options)
        counts = {
            "prefill": options.num_prefill,
            "decode": options.num_decode,
            "encode": options.num_encode,
            "router": options.num_routers,
            "bootstrap": int(options.shared_bootstrap),
        }
        for kind, count in counts.items():
            self.nodes |= {f"{kind[0]}{i}": Node(f"{kind[0]}{i}", kind) for i in range(count)}
        self.around = Surroundings(
            world=self.world,
            network=self.network,
            options=options,
            config=self._config(),
            directory={},
            followers={},
            find=self.find,
            bootstrap_of=self.bootstrap_of,
            shared_bootstrap=ALONE if options.shared_bootstrap else None,
        )
        for node in reversed(list(self.nodes.values())):
            self.start(node)
        clients = Process(self.world, node="c0", life=1, skew_s=0.0)
        self.clients = Clients(
            network=self.network,
            process=clients,
            routers=[f"{node.name}:80" for node in self.nodes.values() if node.kind == "router"],
            workers=[f"{node.name}:80" for node in self.nodes.values() if node.kind in ("prefill", "decode")],
            options=options,
            why_gone=self.why_gone,
        )
        self.world.after_event.append(self._after_event)

    def _config(self) -> TransferConfig:
        return TransferConfig(
            bootstrap_timeout_s=8.0,
            waiting_timeout_s=6.0,
            transfer_timeout_s=4.0,
            handshake_timeout_s=3.0,
            heartbeat_interval_s=0.4,
            drain_timeout_s=5.0,
            transfer_retries=self.options.transfer_retries,
            secret=SECRET if self.options.secret else None,
            max_orphans=64,
            max_tombstones=256,
            max_peers=32,
        )

    # ---- lives

    def start(self, node: Node) -> None:
        """A new life, at the same address."""
        node.lives += 1
        process = node.process = Process(self.world, node=node.name, life=node.lives, skew_s=node.skew_s)
        if node.kind == "router":
            workers = [(n.name, ROLES[n.kind]) for n in self.nodes.values() if n.kind in ROLES]
            node.part = Router(process=process, network=self.network, options=self.options, workers=workers)
        elif node.kind == "bootstrap":
            node.part = SimBootstrap(process, shared=True)
        else:
            node.part = (Encoder if node.kind == "encode" else Worker)(self.around, process, node.kind)
            self.all_workers.append(node.part)
            self.notices.add(node.part)
            self._watch_posts(node.part)

    def _watch_posts(self, worker: Worker) -> None:
        """Remember bodies that came, for the fault that sends them again."""
        address = f"{worker.process.node}:80"
        worker.frontend.on_post = lambda request: self.posts.append((address, request))

    def kill(self, node: Node) -> None:
        assert node.process is not None
        node.process.kill()

    def end(self) -> None:
        """Every process dies, in order: nothing of the run happens at some later garbage collection."""
        for node in self.nodes.values():
            if node.alive:
                self.kill(node)

    def find(self, name: str) -> Process | None:
        """The living process `node.life`."""
        node = self.nodes.get(name.partition(".")[0])
        if node is None or node.process is None or not node.process.alive:
            return None
        return node.process if node.process.name == name else None

    def bootstrap_of(self, address: str) -> SimBootstrap | None:
        node = self.nodes.get(address.partition(":")[0])
        if node is None or not node.alive:
            return None
        return node.part.exchange.bootstrap if isinstance(node.part, Worker) else node.part  # type: ignore[return-value]

    def workers(self) -> list[Worker]:
        """Of living processes."""
        return [n.part for n in self.nodes.values() if n.alive and isinstance(n.part, Worker)]

    def routers(self) -> list[Router]:
        """Living ones."""
        return [n.part for n in self.nodes.values() if n.alive and isinstance(n.part, Router)]

    def why_gone(self, tag: str, address: str, asked_s: float) -> str:
        """Return why the router at `address`, asked at `asked_s`, may find no worker that keeps a stream; "": it must."""
        keeper = next((w.frontend.kept for w in self.all_workers if w.frontend.kept.began(tag)), None)
        if keeper is None:
            raise Violation(f"no worker wrote an event with the id {tag}")
        node = address.partition(":")[0]
        router = next((r for r in self.routers() if r.process.node == node), None)
        if router is None or not router.has_asked(keeper.node, asked_s):
            return "the router is dead, or takes its worker for dead"
        if self.network.faulty_since(node, keeper.node, asked_s):
            return "the way was cut"
        return keeper.why_gone(tag)

    @property
    def capacity(self) -> int:
        """KV tokens of the smaller kind of worker."""
        return min(self.options.pages) * self.options.page_size

    # ---- what must hold

    def _after_event(self, event: Event) -> None:
        node = None if event.process is None else self.nodes.get(event.process.node)
        if node is None or node.part is None or node.process is not event.process:
            return
        if isinstance(node.part, Router):
            node.part.check_if_changed()
        elif isinstance(node.part, Worker):
            self.notices.look(node.part)
            node.part.frontend.check()

    def leftovers(self) -> list[str]:
        """What is not at rest in the whole cluster."""
        found = [f"{node.name} is down" for node in self.nodes.values() if not node.alive]
        found += [f"client {asked.number} has no answer" for asked in self.clients.live.values()]
        for worker in self.workers():
            found += leftovers(worker)
        return found + [left for router in self.routers() for left in router.leftovers()]
