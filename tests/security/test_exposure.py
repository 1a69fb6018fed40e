"""What may not listen off loopback: workers, router and bootstrap server that do not even start without keys or a secret."""

from collections.abc import Callable
from functools import partial

import pytest

from bootstrap_server.registry import BootstrapConfig
from deploy import cli
from disagg.config import DisaggConfig
from disagg.processes.exposure import check_events_exposure, check_exposure, check_nodes_exposure
from engine.config import EngineConfig, ServerConfig
from router.config import RouterConfig
from service.flags import ConfigError
from service.security.browser import is_loopback
from transfer_backends.contract import TransferConfig


def test_everything_binds_loopback_by_default() -> None:
    assert all(is_loopback(c.host) for c in (ServerConfig(), RouterConfig(), BootstrapConfig()))
    assert is_loopback(TransferConfig().control_host) and DisaggConfig().disaggregation_control_host is None  # --host's


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["router", "--host", "0.0.0.0", "--port", "0"], "--host 0.0.0.0: the router would take orders"),
        (["router", "--host", "::", "--port", "0", "--admin-api-key", "x"], "--api-key-file"),
        (["bootstrap", "--host", "0.0.0.0", "--port", "0"], "--cluster-secret-file"),
        (["router", "--api-key-file", "/nowhere"], "--api-key-file: cannot read /nowhere"),
        (["router", "--workers", "2", "--allowed-origins", "ops.example"], "'ops.example' is no origin; write it as"),
        (["router", "--cluster-secret-file", "/nowhere"], "--cluster-secret-file: cannot read /nowhere"),
    ],
)
def test_what_does_not_start_says_why_in_one_line(
    argv: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1 and said in lines[0]


# (host, control host, mode, api key, secret) -> what is refused
WORKERS: list[tuple[str, str | None, str, str | None, str | None, str | None]] = [
    ("127.0.0.1", None, "prefill", None, None, None),
    ("0.0.0.0", None, "null", None, None, "--api-key-file"),
    ("0.0.0.0", None, "null", "k", None, None),
    ("10.0.0.1", None, "decode", "k", None, "--cluster-secret-file"),
    ("10.0.0.1", None, "decode", "k", "file", None),
    ("10.0.0.1", None, "prefill", None, "file", "--api-key-file"),
    ("127.0.0.1", "10.0.0.1", "prefill", None, None, "--disaggregation-control-host 10.0.0.1"),
    ("127.0.0.1", "10.0.0.1", "prefill", None, "file", None),
    ("0.0.0.0", "127.0.0.1", "prefill", "k", None, "--cluster-secret-file"),  # the bootstrap server inside it
]


@pytest.mark.parametrize("case", WORKERS)
def test_workers_off_loopback(
    case: tuple[str, str | None, str, str | None, str | None, str | None], caplog: pytest.LogCaptureFixture
) -> None:
    host, control, mode, key, secret, refused = case
    disagg = DisaggConfig(disaggregation_mode=mode, disaggregation_control_host=control, cluster_secret_file=secret)
    check = partial(check_exposure, disagg=disagg, control_host=control or host)
    check_start(check, partial(ServerConfig, host=host, api_key=key), refused, caplog)


def check_start(
    check: Callable[[ServerConfig], object],
    server: Callable[..., ServerConfig],
    refused: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A safe server starts in silence; another is `refused`, or starts with a warning if a flag allows it."""
    if refused is None:
        check(server())
        assert not caplog.text
        return
    with pytest.raises(ConfigError, match=refused):
        check(server())
    check(server(allow_insecure=True))
    assert "INSECURE" in caplog.text


def test_a_transfer_engine_that_listens_everywhere_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    for mode, backend, told in (("null", "mooncake", 0), ("prefill", "nixl", 0), ("prefill", "mooncake", 1)):
        disagg = DisaggConfig(disaggregation_mode=mode, disaggregation_transfer_backend=backend)
        check_exposure(ServerConfig(), disagg, control_host="127.0.0.1")
        assert caplog.text.count("mooncake listens on every address") == told


@pytest.mark.parametrize(
    ("config", "secret", "refused"),
    [
        (None, None, False),
        ("{}", None, False),
        ('{"endpoint": "tcp://*:5557"}', None, True),
        ('{"endpoint": "tcp://*:5557"}', "file", False),
        ('{"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "tcp://10.0.0.1:2"}', None, True),
    ],
)
def test_kv_events_show_no_prompts_to_strangers(
    config: str | None, secret: str | None, refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine, disagg = EngineConfig(kv_events_config=config), DisaggConfig(cluster_secret_file=secret)
    check = partial(check_events_exposure, engine=engine, disagg=disagg)
    check_start(check, ServerConfig, r"--kv-events-config .*--cluster-secret-file" if refused else None, caplog)


@pytest.mark.parametrize(
    ("address", "secret", "refused"),
    [("127.0.0.1:5000", None, False), ("10.0.0.1:5000", None, True), ("10.0.0.1:5000", "file", False)],
)
def test_no_stranger_joins_the_ranks_of_two_machines(
    address: str, secret: str | None, refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = EngineConfig(tp_size=2, nnodes=2, dist_init_addr=address)
    check = partial(check_nodes_exposure, engine=engine, disagg=DisaggConfig(cluster_secret_file=secret))
    check_start(check, ServerConfig, "--dist-init-addr .*--cluster-secret-file" if refused else None, caplog)


def test_a_machine_without_http_has_a_transfer_engine_too(caplog: pytest.LogCaptureFixture) -> None:
    for node, warnings in ((0, 0), (1, 1)):
        engine = EngineConfig(tp_size=2, nnodes=2, node_rank=node, dist_init_addr="127.0.0.1:5000")
        disagg = DisaggConfig(disaggregation_mode="decode", disaggregation_transfer_backend="mooncake")
        check_nodes_exposure(ServerConfig(), engine, disagg)
        assert caplog.text.count("mooncake listens on every address") == warnings
