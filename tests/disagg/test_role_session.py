"""What one life of a worker leaves to the next: flags stay, weights and adapters are those it had at its end."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.config import DisaggConfig
from disagg.processes.rank_start import gpus_of_ranks
from disagg.processes.session_plan import SessionPlan, next_session, plan_session
from engine.config import EngineConfig, ServerConfig
from engine.flags.resolve import STEP_WITH_ANSWERS_S
from engine.flags.tokenizer import grammar_backend
from engine.frontend.role_switch import RoleSwitchState
from engine.frontend.server import Patience
from engine.model_files.model_config import DEFAULT_MODEL_PATH, WIDE_MODEL_PATH
from service.flags import ConfigError


def plan(*, engine: EngineConfig | None = None, server: ServerConfig | None = None) -> SessionPlan:
    return plan_session(
        engine=engine or EngineConfig(model_path=DEFAULT_MODEL_PATH),
        server=server or ServerConfig(),
        disagg=DisaggConfig(disaggregation_mode="prefill", disaggregation_bootstrap_port=7),
    )


UNCHANGED = RoleSwitchState(
    role="decode", model_path=DEFAULT_MODEL_PATH, served_name="recall", weight_version="default", adapters={}
)


@pytest.mark.parametrize(
    ("sizes", "device", "gpus", "given"),
    [
        ({}, "auto", "ab", [()]),
        ({"dp_size": 2}, "auto", "abc", [("a",), ("b",)]),
        ({"tp_size": 2}, "auto", "abc", [("a", "b")]),
        ({"tp_size": 2, "pp_size": 2, "dp_size": 2}, "cuda", "abcdefgh", [tuple("abcd"), tuple("efgh")]),
        ({"dp_size": 2}, "cpu", "a", [(), ()]),
        ({"dp_size": 3}, "auto", "", [(), (), ()]),
        ({"pp_size": 4, "nnodes": 2}, "auto", "ab", [()]),
    ],
)
def test_each_rank_has_a_gpu_of_its_own(
    sizes: dict[str, Any], device: str, gpus: str, given: list[tuple[str, ...]]
) -> None:
    assert gpus_of_ranks(EngineConfig(device=device, **sizes), lambda: list(gpus)) == given


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"dp_size": 3}, "--dp-size 3: 3 ranks for 2 GPUs"),
        ({"tp_size": 2, "pp_size": 2}, "--tp-size 2, --pp-size 2: 4 ranks for 2 GPUs"),
        ({"tp_size": 2, "dp_size": 2}, "--tp-size 2, --dp-size 2: 4 ranks for 2 GPUs"),
    ],
)
def test_more_ranks_than_gpus_are_refused_with_both_numbers(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{said} \(a, b\); lower it"):
        gpus_of_ranks(EngineConfig(**sizes), lambda: ["a", "b"])


def test_requests_of_a_unified_worker_have_no_room() -> None:
    server = ServerConfig(load_balance_method="follow_bootstrap_room")
    assert plan(server=server).server is server
    with pytest.raises(ConfigError, match="--load-balance-method follow_bootstrap_room"):
        plan_session(engine=EngineConfig(model_path=DEFAULT_MODEL_PATH), server=server, disagg=DisaggConfig())


def test_flags_stay_and_the_role_changes() -> None:
    before = plan()
    after = next_session(before, UNCHANGED)
    assert after.role == "decode" and not after.has_bootstrap_server and before.has_bootstrap_server
    assert replace(after.disagg, disaggregation_mode="prefill") == before.disagg
    assert replace(after.given, served_model_name=None) == before.given
    assert next_session(after, replace(UNCHANGED, role="prefill")).has_bootstrap_server


def test_a_worker_on_several_machines_keeps_its_role() -> None:
    engine = EngineConfig(model_path=WIDE_MODEL_PATH, tp_size=2, nnodes=2, dist_init_addr="127.0.0.1:5000")
    with pytest.raises(ConfigError, match="--nnodes 2: a worker on several machines keeps its role; start another one"):
        next_session(plan(engine=engine), replace(UNCHANGED, model_path=WIDE_MODEL_PATH))


def test_a_machine_without_http_needs_no_key_of_it() -> None:
    """Its --host, the same flag as node 0's, is nothing that it listens on."""
    flags = {"model_path": WIDE_MODEL_PATH, "tp_size": 2, "nnodes": 2, "dist_init_addr": "10.0.0.1:5000"}
    server = ServerConfig(host="0.0.0.0")
    disagg = DisaggConfig(disaggregation_mode="decode", cluster_secret_file=__file__)
    assert plan_session(engine=EngineConfig(node_rank=1, **flags), server=server, disagg=disagg).control_host == ""
    with pytest.raises(ConfigError, match="peers need one address of this worker"):
        plan_session(engine=EngineConfig(node_rank=0, **flags), server=server, disagg=disagg)


def test_weights_and_adapters_that_came_while_it_ran_go_with_it(tmp_path: Path) -> None:
    """Loaded: two. Unloaded: the one that a flag named."""
    engine = EngineConfig(model_path=DEFAULT_MODEL_PATH, lora_paths=(f"gone={tmp_path}",))
    to = replace(UNCHANGED, weight_version="7", adapters={"a": str(tmp_path), "b": str(tmp_path)})
    after = next_session(plan(engine=engine), to).engine
    assert (after.weight_version, after.lora_paths) == ("7", (f"a={tmp_path}", f"b={tmp_path}"))
    assert next_session(plan(engine=engine), UNCHANGED).engine.enable_lora, "adapters may still be loaded"


@pytest.mark.parametrize(
    ("adapters", "says"),
    [({"a": "/no/such/directory"}, "'a' cannot be loaded again: /no/such/directory"), ({"a=b": "/tmp"}, "a '=' in it")],
)
def test_adapters_that_cannot_be_loaded_again_are_reported_before_any_drain(
    adapters: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        next_session(plan(), replace(UNCHANGED, adapters=adapters))


def test_new_weights_without_a_tokenizer_or_a_model_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        next_session(plan(), replace(UNCHANGED, model_path=str(tmp_path)))
    (tmp_path / "config.json").write_bytes((Path(DEFAULT_MODEL_PATH) / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="tokenizer"):
        next_session(plan(), replace(UNCHANGED, model_path=str(tmp_path)))


def test_a_worker_without_a_tokenizer_needs_none_for_new_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((Path(DEFAULT_MODEL_PATH) / "config.json").read_bytes())
    engine = EngineConfig(model_path=DEFAULT_MODEL_PATH, skip_tokenizer_init=True)
    assert next_session(plan(engine=engine), replace(UNCHANGED, model_path=str(tmp_path))).engine.skip_tokenizer_init


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"tool_call_parser": "qwen25"}, "--tool-call-parser qwen25"),
        ({"reasoning_parser": "qwen3"}, "--reasoning-parser qwen3"),
        ({"grammar_backend": "llguidance"}, "--grammar-backend llguidance"),
        ({"constrained_json_disable_any_whitespace": True}, "--constrained-json-disable-any-whitespace"),
    ],
)
def test_flags_that_need_text_contradict_a_worker_without_a_tokenizer(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{said}: needs the tokenizer that --skip-tokenizer-init leaves out; "):
        plan(engine=EngineConfig(model_path=DEFAULT_MODEL_PATH, skip_tokenizer_init=True, **flags))
    assert plan(engine=EngineConfig(model_path=DEFAULT_MODEL_PATH, **flags))


def test_grammars_are_off_without_a_tokenizer() -> None:
    assert plan(engine=EngineConfig(model_path=DEFAULT_MODEL_PATH, skip_tokenizer_init=True, grammar_backend="none"))
    assert grammar_backend(EngineConfig(skip_tokenizer_init=True)) == "none"
    assert grammar_backend(EngineConfig()) == "llguidance"
    assert grammar_backend(EngineConfig(grammar_backend="none")) == "none"


def test_rules_of_the_new_role_hold() -> None:
    """A bootstrap server that strangers could reach needs a secret; a decode worker has none of its own."""
    disagg = DisaggConfig(disaggregation_mode="decode", disaggregation_control_host="127.0.0.1")
    server = ServerConfig(host="10.0.0.1", api_key="k")
    decode = plan_session(engine=EngineConfig(model_path=DEFAULT_MODEL_PATH), server=server, disagg=disagg)
    with pytest.raises(ConfigError, match="--cluster-secret-file"):
        next_session(decode, replace(UNCHANGED, role="prefill"))


@pytest.mark.parametrize(
    ("flags", "mode", "mixed", "step_s"),
    [
        ({}, "null", None, None),
        ({}, "prefill", True, None),
        ({"device": "cpu"}, "decode", True, STEP_WITH_ANSWERS_S["cpu"]),
        ({"device": "cuda"}, "decode", True, STEP_WITH_ANSWERS_S["cuda"]),
        ({"enable_mixed_chunk": False, "max_step_time_s": 0.0}, "decode", False, 0.0),
        ({"chunked_prefill_size": -1}, "decode", True, None),
        ({"enable_pdmux": True}, "decode", None, None),
    ],
)
def test_a_decode_workers_answers_go_on_beside_prompts_in_short_steps(
    flags: dict[str, Any], mode: str, mixed: bool | None, step_s: float | None
) -> None:
    """Unless flags say otherwise; the next role has its own defaults."""
    given = EngineConfig(model_path=DEFAULT_MODEL_PATH, **flags)
    disagg = DisaggConfig(disaggregation_mode=mode, disaggregation_bootstrap_port=7)
    found = plan_session(engine=given, server=ServerConfig(), disagg=disagg)
    assert (found.engine.enable_mixed_chunk, found.engine.max_step_time_s) == (mixed, step_s)
    if mode == "decode" and "device" in flags:
        following = next_session(found, replace(UNCHANGED, role="prefill"))
        assert (following.engine.enable_mixed_chunk, following.engine.max_step_time_s) == (True, None)


def test_a_drain_for_a_switch_has_its_own_time_until_the_worker_is_to_end() -> None:
    patience = Patience(30.0, 600.0)
    assert patience.lasts(0.0, ends=False) and patience.lasts(599.0, ends=False)
    assert patience.lasts(599.5, ends=True) and patience.lasts(629.0, ends=True)
    assert not patience.lasts(629.5, ends=True)
    assert not Patience(30.0, 0.0).lasts(0.0, ends=False)
    only_end = Patience(30.0, None)
    assert only_end.lasts(0.0, ends=True) and not only_end.lasts(30.0, ends=True)


def test_a_forecast_of_the_queue_needs_one_frontend() -> None:
    """Each would see its own requests alone."""
    with pytest.raises(ConfigError, match="--enable-early-rejection: needs --tokenizer-worker-num 1"):
        plan(server=ServerConfig(tokenizer_worker_num=2, enable_early_rejection=True))
