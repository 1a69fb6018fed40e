"""Clusters that the files of this folder share: the shipped model, behind a router over both real transfer engines, and alone.

They end with the folder. Nothing here kills or reconfigures them; a prompt that must not be cached is a file's own.
"""

import threading
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import SHIPPED, Cluster, cluster
from tests.e2e.shared.otlp_receiver import OtlpReceiver

SECRET = "only this cluster knows it"


@pytest.fixture(scope="package")
def receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    thread = threading.Thread(target=receiver.server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        receiver.server.server_close()
        thread.join()


@pytest.fixture(scope="package")
def nixl(tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver) -> Iterator[Cluster]:
    """One prefill, one decode worker; the asynchronous stream, so that depth is 2. Its logs are JSON, its spans go out."""
    folder = tmp_path_factory.mktemp("nixl")
    patch = pytest.MonkeyPatch()
    patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms until a batch is sent
    logs = ("--run-dir", str(folder / "logs"), "--log-level", "info", "--log-format", "json", "--log-requests")
    spans = ("--otlp-traces-endpoint", receiver.url)
    with cluster(folder, "--transfer-backend", "nixl", "--stream", "threaded", *SHIPPED, *logs, *spans) as c:
        patch.undo()
        yield c


@pytest.fixture(scope="package")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill workers: any may serve any request. All share a secret, so all they say is authenticated.

    Prefill workers tell the router what they cache, and prompts go by it. They exchange prefixes.
    """
    folder = tmp_path_factory.mktemp("mooncake")
    secret = folder / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    events = '{"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}'
    args = (
        *("--prefill", "2", "--cluster-secret-file", str(secret)),
        *("--kv-events-config", events, "--prefill-policy", "cache_aware", "--prefix-fetch"),
    )
    with cluster(folder, "--transfer-backend", "mooncake", *args, *SHIPPED) as c:
        yield c


@pytest.fixture(scope="package")
def unified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker that does both."""
    with cluster(tmp_path_factory.mktemp("unified"), "--unified", *SHIPPED) as c:
        yield c


@pytest.fixture(scope="package", params=["nixl", "mooncake"])
def pd(request: pytest.FixtureRequest) -> Cluster:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]
