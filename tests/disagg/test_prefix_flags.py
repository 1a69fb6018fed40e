"""What --prefix-fetch does not go with is refused at the start, by name."""

from typing import Any

import pytest

from disagg.config import DisaggConfig, SchedulerSpec
from disagg.processes.exposure import make_allowlist
from disagg.processes.transfer_machine import check_flags, check_prefix_fetch
from engine.config import EngineConfig, ServerConfig
from service.flags import ConfigError
from service.security.keys import ROUTER_SECRET


def spec_of(mode: str = "prefill", **engine: Any) -> SchedulerSpec:
    return SchedulerSpec(
        engine=EngineConfig(**engine),
        disagg=DisaggConfig(disaggregation_mode=mode, prefix_fetch=True),
        ipc_dir="",
        control_host="127.0.0.1",
        bootstrap=None,
    )


@pytest.mark.parametrize(
    ("engine", "error"),
    [
        ({"disable_radix_cache": True}, "--prefix-fetch: --disable-radix-cache leaves no place"),
        ({"dp_size": 2}, "--prefix-fetch: not with --dp-size 2"),
    ],
)
def test_flags_that_do_not_fit(engine: dict[str, Any], error: str) -> None:
    for mode in ("prefill", "decode"):  # which may become one
        with pytest.raises(ConfigError, match=error):
            check_prefix_fetch(spec_of(mode, **engine))
    check_prefix_fetch(spec_of())
    check_prefix_fetch(spec_of("null", **engine))


def test_a_backend_that_moves_nothing() -> None:
    with pytest.raises(ConfigError, match="--prefix-fetch: --disaggregation-transfer-backend fake moves no KV"):
        check_flags(DisaggConfig(prefix_fetch=True, disaggregation_transfer_backend="fake"))


def test_a_prefill_worker_dials_what_its_router_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks no bootstrap server, so it refuses none."""
    disagg = DisaggConfig(disaggregation_mode="prefill", prefix_fetch=True)
    with pytest.raises(ConfigError, match="--prefix-fetch: needs --cluster-secret-file"):
        make_allowlist(ServerConfig(), disagg, control_host="127.0.0.1")
    monkeypatch.setenv(ROUTER_SECRET, "of router and workers")
    here = make_allowlist(ServerConfig(), disagg, control_host="127.0.0.1")
    assert here.admits("10.1.2.3:5") and not here.admits("10.1.2.3")
