"""`Cluster`: what `tandem up` starts, from Python."""

import tempfile
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import IO, TYPE_CHECKING, Any

from deploy.chat.local_cluster import NotStarted, local_cluster
from deploy.launcher.up_flags import build_parser
from service.flags import ConfigError
from service.security.keys import KeyRing
from tandem.errors import TandemError
from tandem.flags import argv_of, in_python

if TYPE_CHECKING:
    from openai import OpenAI

NO_KEY = "none"  # OpenAI's client wants some key
WRONG_FLAGS = 2  # exit status of a command line
LAST_LINES = 8
STARTS = "(logs: "  # in the line of `tandem up` that says that its flags are right
_HEADS = ("tandem up: error: ", "tandem up: ")


class Cluster:
    """A router, prefill and decode workers on this machine.

    `model`, `flags`: as for `LLM`, and those of `tandem up`. The router listens on a free port of
    loopback by default (`port`, `host`). Returns when all are healthy. Raises
    ConfigError for a wrong flag, TandemError if a process does not start. Use it as a context
    manager, or call `close`; it also ends with the program. `url`: of the router.
    """

    def __init__(self, model: str = "", *, prefill: int = 1, decode: int = 1, **flags: Any) -> None:
        shape = {name: count for name, count in (("prefill", prefill), ("decode", decode)) if count != 1}
        argv = argv_of(model, {**shape, **flags}, known=build_parser().options)
        self._keys = KeyRing(key=flags.get("api_key"), file=flags.get("api_key_file"))
        started: Future[str] = Future()
        closing = threading.Event()
        # `up` ends with the thread that started it: this one lives until `close`
        thread = threading.Thread(target=_hold, args=(argv, started, closing), name="tandem-cluster", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, thread, closing)
        try:
            self.url = started.result()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def openai(self, **options: Any) -> "OpenAI":
        """A client of OpenAI's package for this cluster. `options`: of its constructor.

        Raises ImportError without the package.
        """
        try:
            from openai import OpenAI
        except ImportError:
            raise ImportError("Cluster.openai: needs OpenAI's client: pip install 'tandem-serve[openai]'") from None
        return OpenAI(**{"base_url": f"{self.url}/v1", "api_key": self._keys.first or NO_KEY, **options})

    def close(self) -> None:
        """End all processes. A second call does nothing."""
        self._end()


def _hold(argv: Sequence[str], started: "Future[str]", closing: threading.Event) -> None:
    with tempfile.TemporaryFile("w+") as output:
        try:
            with local_cluster(argv, output=output, is_wanted=lambda: not closing.is_set()) as url:
                started.set_result(url)
                closing.wait()
        except NotStarted as error:
            started.set_exception(_reason(error.status, output))
        except BaseException as error:
            started.set_exception(error)


def _reason(status: int, output: IO[str]) -> Exception:
    output.seek(0)
    lines = [line.strip() for line in output if line.strip()]
    errors = [line.removeprefix(_HEADS[0]) for line in lines if line.startswith(_HEADS[0])]
    if errors and not any(STARTS in line for line in lines):
        return ConfigError(in_python(errors[-1]))
    if status != WRONG_FLAGS:
        return TandemError("the cluster did not start: " + " / ".join(errors or lines[-LAST_LINES:] or [str(status)]))
    last = lines[-1] if lines else "wrong flags"
    for head in _HEADS:
        last = last.removeprefix(head)
    return ConfigError(in_python(last.removesuffix(" (see tandem up --help)")))


def _end(thread: threading.Thread, closing: threading.Event) -> None:
    closing.set()
    thread.join()
