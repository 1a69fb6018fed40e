"""What encode workers, and those that ask them, refuse at the start, by name; and what they say once."""

from pathlib import Path
from typing import Any

import pytest

from disagg.config import DisaggConfig, SchedulerSpec
from disagg.processes.exposure import make_allowlist
from disagg.processes.session_plan import plan_session
from disagg.processes.transfer_machine import check_feature_fetch, check_flags
from engine.assembly.encoder import build_encoder
from engine.config import EngineConfig, ServerConfig
from engine.device.feature_pool import PAGE_TOKENS
from engine.flags.encoder import STEP_TOKENS, encoder_config
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config
from service.flags import ConfigError
from service.security.keys import ROUTER_SECRET
from tests.models.tiny_seeing import make_seeing_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_seeing_checkpoint(tmp_path_factory.mktemp("seeing"), "qwen3_vl")


def session(path: str, *, server: dict[str, Any] | None = None, mode: str = "encode", **engine: Any) -> object:
    return plan_session(
        engine=EngineConfig(model_path=path, num_threads=1, **engine),
        server=ServerConfig(**(server or {})),
        disagg=DisaggConfig(disaggregation_mode=mode, feature_fetch=mode == "null"),
    )


@pytest.mark.parametrize("name", ["tp_size", "pp_size"])
def test_an_encode_worker_is_one_process(path: str, name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(
        ConfigError, match=f"{flag} 2: an encode worker is one process; start an encode worker for each GPU"
    ):
        session(path, **{name: 2})
    session(path)


def test_a_model_of_text_has_nothing_to_encode() -> None:
    with pytest.raises(ConfigError, match=r"--disaggregation-mode encode: .* sees no images"):
        session(DEFAULT_MODEL_PATH)
    with pytest.raises(ConfigError, match="--feature-fetch: the model sees no images; leave it out"):
        check_feature_fetch(spec_of(), load_model_config(DEFAULT_MODEL_PATH))


def spec_of(**engine: Any) -> SchedulerSpec:
    return SchedulerSpec(
        engine=EngineConfig(**engine),
        disagg=DisaggConfig(feature_fetch=True),
        ipc_dir="",
        control_host="127.0.0.1",
        bootstrap=None,
    )


@pytest.mark.parametrize(
    ("flags", "name"),
    [({"feature_fetch": True}, "--feature-fetch"), ({"disaggregation_mode": "encode"}, "--disaggregation-mode encode")],
)
def test_a_backend_that_moves_nothing_moves_no_features(flags: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: --disaggregation-transfer-backend fake moves no features"):
        check_flags(DisaggConfig(disaggregation_transfer_backend="fake", **flags))
    check_flags(DisaggConfig(**flags))


@pytest.mark.parametrize("mode", ["null", "encode"])
def test_peers_need_one_address(path: str, mode: str) -> None:
    anywhere = {"host": "0.0.0.0", "allow_insecure": True}
    with pytest.raises(ConfigError, match=r"--host 0.0.0.0: .*--disaggregation-control-host"):
        session(path, mode=mode, server=anywhere)


def test_a_worker_with_stages_says_once_that_it_encodes_itself(path: str, caplog: pytest.LogCaptureFixture) -> None:
    check_feature_fetch(spec_of(pp_size=2), load_model_config(path))
    assert "--feature-fetch: not with --pp-size 2" in caplog.text and "encodes all images itself" in caplog.text


def test_a_worker_that_fetches_knows_its_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router alone names workers to it, and it is known by a secret. A worker that fetches nothing dials none."""
    asked = DisaggConfig(feature_fetch=True)
    with pytest.raises(ConfigError, match="--feature-fetch: needs --cluster-secret-file"):
        make_allowlist(ServerConfig(), asked, control_host="127.0.0.1")
    monkeypatch.setenv(ROUTER_SECRET, "of router and workers")
    assert make_allowlist(ServerConfig(), asked, control_host="127.0.0.1").admits("10.9.9.9:5000")
    assert not make_allowlist(ServerConfig(), DisaggConfig(), control_host="127.0.0.1").admits("127.0.0.1:5000")
    monkeypatch.setenv(ROUTER_SECRET, "short")
    with pytest.raises(ConfigError, match=f"{ROUTER_SECRET}: holds 5 bytes, at least 16 are needed"):
        make_allowlist(ServerConfig(), asked, control_host="127.0.0.1")


def test_what_a_text_model_needs_says_nothing_to_an_encoder(path: str) -> None:
    """So one set of flags starts all workers of a cluster."""
    flags: dict[str, Any] = {
        "page_size": 4,
        "max_total_tokens": 8192,
        "chunked_prefill_size": 32,
        "kv_cache_dtype": "fp8_e4m3",
        "speculative_algorithm": "NGRAM",
        "enable_lora": True,
        "kv_events_config": '{"endpoint": "tcp://127.0.0.1:*"}',
        "enable_hierarchical_cache": True,
        "quantization": "int8wo",
    }
    model = load_model_config(path)
    given = EngineConfig(model_path=path, dtype="bfloat16", **flags)
    resolved = encoder_config(given, model, page_size=PAGE_TOKENS, cuda=False)
    assert resolved.page_size == PAGE_TOKENS and resolved.max_prefill_tokens == STEP_TOKENS["cpu"]
    assert not resolved.enable_lora and resolved.speculative_algorithm is None and resolved.quantization is None


def test_a_cache_without_room_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.flags.images.MEGABYTE", 1000)
    with pytest.raises(ConfigError, match="--vlm-cache-size-mb 1: it holds no page of features"):
        build_encoder(EngineConfig(model_path=path, vlm_cache_size_mb=1), load_model_config(path))


def test_files_that_do_not_fit_are_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        build_encoder(EngineConfig(model_path=str(tmp_path)), load_model_config(path))
