"""A bootstrap server, and workers that register at one."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bootstrap_server.app import BootstrapServer
from bootstrap_server.client import Registrar
from bootstrap_server.registry import BootstrapConfig
from tests.bootstrap.test_registry import worker


@pytest.fixture
def serve() -> Iterator[Callable[..., BootstrapServer]]:
    with contextlib.ExitStack() as stack:

        def start(*, shared: bool = True, secret: bytes | None = None, port: int = 0, **config: Any) -> BootstrapServer:
            server = BootstrapServer(BootstrapConfig(port=port, **config), shared=shared, secret=secret)
            stack.callback(server.close)
            server.start()
            return server

        yield start


@pytest.fixture
def register() -> Iterator[Callable[..., Registrar]]:
    with contextlib.ExitStack() as stack:

        def start(server_port: int, *args: Any, secret: bytes | None = None, **kwargs: Any) -> Registrar:
            registrar = Registrar(f"127.0.0.1:{server_port}", worker(*args, **kwargs), secret=secret)
            stack.callback(registrar.close)
            registrar.start()
            return registrar

        yield start
