"""What holds for every test: a run stops at once, with one line, where the machine lacks what its tests need; no test of
hypothesis depends on how fast the machine is; tests that are coroutines run on an event loop of their own; workers that
tests start are forked, from processes that have imported what they need.
"""

import contextlib
import gc
import inspect
import os
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from deploy.launcher.fork_servers import HTTP_MODULES, fork_server
from disagg.processes.children import PRELOADED, openmp_env
from engine.device.gpus import installed_gpus
from service.process.child_process import HTTP_SERVER_VARIABLE, SERVER_VARIABLE
from tests.deploy.terminal import OF_TERMINALS
from tests.machine.needs import complaint
from tests.packages import ROOT

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Folders whose files share servers or a browser.
SHARED = ("e2e/shared", "e2e/tiny", "hostile", "tandem", "router/http")
LONG = (
    *(*SHARED, "e2e", "tools/test_matrix.py", "transfer/engines/test_contract.py"),
    *("attention/triton/test_triton.py", "simulation", "engine/device/test_gpu_check.py", "security"),
    "sampler/test_triton_sampler.py",
)

os.environ["HF_HUB_OFFLINE"] = "1"  # here, too, for fork servers: a library reads it as it is imported
os.environ.update(OF_TERMINALS)  # for fork servers: in another environment than its own one forks nothing
if str(ROOT) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # once: xdist's processes inherit it
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
gc.disable()  # while a million objects are imported and collected, which then live to the end


STARTED = ("e2e", "hostile", "security", "deploy", "tandem")  # folders whose tests start workers
fork_servers = contextlib.ExitStack()  # as long as the run lasts


def start_fork_servers() -> None:
    """Unless they are there: the processes of pytest-xdist have those of their controller."""
    if installed_gpus() or SERVER_VARIABLE in os.environ:
        return
    env = {**os.environ, **openmp_env(1, os.environ, shares_cores=False)}
    http = fork_server((*HTTP_MODULES, "tests.e2e.settings"), env=os.environ, variable=HTTP_SERVER_VARIABLE)
    servers = [fork_servers.enter_context(server) for server in (fork_server(PRELOADED, env=env), http)]
    os.environ.update(servers[0] | servers[1])


def share_tls_contexts() -> None:
    """Among HTTP clients (openai's and anthropic's, too) that ask for the same: each would read all certificates that this
    machine trusts, for 16 ms of CPU."""
    for clients in filter(None, map(sys.modules.get, ("httpx._transports.default", "httpx2._transports.default"))):
        clients.create_ssl_context = cache(clients.create_ssl_context)  # type: ignore[attr-defined]


def pytest_sessionfinish() -> None:
    fork_servers.close()


@contextlib.contextmanager
def same_environment() -> Iterator[None]:
    """Remove the variables that a library adds meanwhile: in another environment than its own, a fork server forks nothing."""
    before = set(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - before:
            del os.environ[name]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Any:
    with same_environment():  # torch adds a directory for its caches
        collected = yield
    gc.enable()
    gc.freeze()
    share_tls_contexts()
    places = tuple(f"tests/{place}/" for place in STARTED)
    if not session.config.option.collectonly and any(item.nodeid.startswith(places) for item in session.items):
        start_fork_servers()
    return collected


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Any:
    """Transfer engines in a test's own process add settings of their libraries."""
    with same_environment():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order whole clusters and long files first: at the end, one process would be left alone with files of a minute each."""
    starts = [(f"tests/{place}/", f"tests/{place}::") for place in LONG]
    items.sort(key=lambda item: next((i for i, start in enumerate(starts) if item.nodeid.startswith(start)), len(LONG)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    uvloop.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return ByServers(config, log)


class ByServers(LoadScopeScheduling):
    """Runs the tests that share servers, those of a file or of a folder in `SHARED`, in one process of pytest-xdist.

    Its own groups (`xdist_group`) are lost without a word under pytest 9.2 (xdist 3.8 sets `_nodeid`, which is no more).
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return next((folder for folder in SHARED if path.startswith(f"tests/{folder}/")), path)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # a process of pytest-xdist: its controller has looked
    folder = config.invocation_params.dir
    if said := complaint([(folder / arg.partition("::")[0]).resolve() for arg in config.args]):
        raise pytest.UsageError(said)
    is_metered = config.pluginmanager.has_plugin("tools.cpu_seconds")  # it counts what comes from the process of a test
    if getattr(config.option, "numprocesses", None) and not is_metered:
        start_fork_servers()  # for all processes of pytest-xdist
