"""Engines that the tests of this folder share, with the shipped model: an `LLM`, an `AsyncLLM`, and a server beside them."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx2 as httpx
import pytest

import tandem.asgi
from engine.model_files.model_config import DEFAULT_MODEL_PATH
from tandem import LLM, AsyncLLM
from tandem.asgi import WorkerApp
from tests.e2e import cluster
from tests.lora.tiny_adapters import make_tiny_adapter

FLAGS: dict[str, Any] = {"max_total_tokens": 16384, "chunked_prefill_size": 256, "random_seed": 7}
Post = Callable[[str, dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM(**FLAGS, enable_lora=True) as engine:
        yield engine


@pytest.fixture(scope="session")
def worker_app() -> Iterator[WorkerApp]:
    """An ASGI application that is an `AsyncLLM`, too."""
    engine = tandem.asgi.app(**FLAGS, enable_lora=True)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def async_llm(worker_app: WorkerApp) -> AsyncLLM:
    return worker_app


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a worker with the same flags."""
    flags = [word for name, value in FLAGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with cluster.tandem(
        tmp_path_factory.mktemp("server"), "serve", "--port", "0", "--log-level", "warning", *flags
    ) as started:
        yield started.url


@pytest.fixture
def post(server: str) -> Post:
    """Send a body to the server; its answer."""

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.post(server + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    return post


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A LoRA adapter of the shipped model, random."""
    folder = tmp_path_factory.mktemp("adapter")
    return make_tiny_adapter(folder, DEFAULT_MODEL_PATH, seed=3, lora_alpha=64)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where a shell has started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
