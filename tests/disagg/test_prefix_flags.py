"""What --prefix-fetch does not go with is refused at the start, by name."""

from pathlib import Path
from typing import Any

import pytest

from disagg.config import DisaggConfig, SchedulerSpec
from disagg.processes.exposure import make_allowlist
from disagg.processes.transfer_machine import check_flags, check_prefix_fetch
from engine.config import EngineConfig, ServerConfig
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config
from service.flags import ConfigError
from service.security.keys import ROUTER_SECRET
from tests.e2e.models.group_models import SOME_WINDOWS
from tests.e2e.two_engines import disaggregated
from tests.models.tiny_checkpoints import make_tiny_checkpoint


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
    model = load_model_config(DEFAULT_MODEL_PATH)
    for mode in ("prefill", "decode"):  # which may become one
        with pytest.raises(ConfigError, match=error):
            check_prefix_fetch(spec_of(mode, **engine), model)
    check_prefix_fetch(spec_of(), model)
    check_prefix_fetch(spec_of("null", **engine), model)


def test_a_recurrent_model(tmp_path: Path) -> None:
    model = load_model_config(make_tiny_checkpoint(tmp_path / "m", "qwen3_next"))
    with pytest.raises(ConfigError, match="--prefix-fetch: the model has recurrent layers"):
        check_prefix_fetch(spec_of(), model)


def test_windows_with_pages_of_their_own(tmp_path: Path) -> None:
    family, overrides = SOME_WINDOWS
    checkpoint = make_tiny_checkpoint(tmp_path / "m", family, **overrides)
    flags = {"prefix_fetch": True}
    with (
        pytest.raises(ConfigError, match=r"--prefix-fetch: .* give --disable-hybrid-swa-memory"),
        disaggregated(checkpoint, decode={}, disagg=flags, max_total_tokens=4096, page_size=4),
    ):
        pass


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
