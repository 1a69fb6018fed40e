"""HTTP as the simulation sees it: one request a connection, an answer whole or in parts, and what can go wrong."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tools.simulation.network import End, Network
from tools.simulation.world import Process


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Head:
    status: int
    content_type: str
    retry_after: str = ""


_END = object()


class Reply:
    """The server's side of one exchange. `on_gone` is called when the client leaves before the end."""

    def __init__(self, end: End) -> None:
        self._end = end
        self.on_gone: Callable[[], None] = lambda: None
        self.ended = False

    @property
    def connected(self) -> bool:
        return self._end.open

    def head(self, status: int, content_type: str = "application/json", *, retry_after: str = "") -> None:
        self._end.send(Head(status, content_type, retry_after), f"http {status}")

    def chunk(self, data: bytes) -> None:
        self._end.send(data, "http data")

    def finish(self) -> None:
        self.ended = True
        self._end.send(_END, "http end")
        self._end.close()

    def whole(self, status: int, body: bytes, *, retry_after: str = "") -> None:
        self.head(status, retry_after=retry_after)
        self.chunk(body)
        self.finish()


Handler = Callable[[Request, Reply], None]


def serve(network: Network, process: Process, address: str, handler: Handler) -> None:
    """Requests that reach `address` go to `handler`."""

    def accept(end: End) -> None:
        reply = Reply(end)
        end.on_data = lambda request: handler(request, reply)
        end.on_close = lambda: None if reply.ended else reply.on_gone()

    network.listen(address, process, accept)


@dataclass(eq=False)
class Call:
    """The client's side. Callbacks: `on_head`, then `on_chunk`..., then `on_end`; or `on_lost("refused" | "lost")`."""

    on_head: Callable[[Head], None] = lambda head: None
    on_chunk: Callable[[bytes], None] = lambda data: None
    on_end: Callable[[], None] = lambda: None
    on_lost: Callable[[str], None] = lambda reason: None
    end: End | None = None
    over: bool = False

    def _on_data(self, value: object) -> None:
        if self.over:
            return
        if isinstance(value, Head):
            self.on_head(value)
        elif isinstance(value, bytes):
            self.on_chunk(value)
        else:
            self.over = True
            self.on_end()
            assert self.end is not None
            self.end.close()

    def _on_close(self) -> None:
        if not self.over:
            self.over = True
            assert self.end is not None
            self.on_lost("refused" if self.end.other is None else "lost")

    def cancel(self) -> None:
        """The client leaves."""
        self.over = True
        if self.end is not None:
            self.end.close()


def call(network: Network, process: Process, address: str, request: Request, result: Call) -> Call:
    result.end = network.connect(process, address, on_data=result._on_data, on_close=result._on_close)
    result.end.send(request, f"{request.method} {request.path}")
    return result
