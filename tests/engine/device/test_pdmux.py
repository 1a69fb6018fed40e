"""PD multiplexing with real models: two lanes compute at the same time, and each answer has the tokens that it has without."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from disagg.config import DisaggConfig
from disagg.processes.session_plan import plan_session
from engine.config import EngineConfig, ServerConfig
from engine.core.plan import STREAMS, Phase, Plan
from engine.flags.resolve import depth, limits, resolve
from engine.kernels import tape
from engine.kernels.linear import linear_kernel
from engine.messages import LogprobOptions
from engine.model_files.model_config import DEFAULT_MODEL_PATH, WIDE_MODEL_PATH, load_model_config
from engine.pdmux.core_share import PROMPT_NICENESS, CoreShare
from engine.pdmux.phases import lane_share
from service.flags import ConfigError
from tests.cells import some
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.three_requests import two_models
from tests.models.tiny_checkpoints import make_tiny_checkpoint

FLAGS: dict[str, Any] = {"chunked_prefill_size": 16, "max_total_tokens": 2048, "max_running_requests": 8}
LANES: dict[str, Any] = {"enable_pdmux": True, "stream_delay_s": 0.001, "num_threads": 2}
SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 30, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.8, "logit_bias": {60: 2.0}, "min_new_tokens": 4, "ignore_eos": False},
)
# Windows of a pool of their own and a mixture; windows and caps; a mixture; latents.
FAMILIES = ("gpt_oss", "gemma2", "qwen3_moe", "deepseek_v3")


def answers(engine: EngineInProcess, count: int = 10) -> dict[str, list[int]]:
    """Requests that arrive while others run, some of which begin alike."""
    for i in range(count):
        prompt = prompt_of(48, i % 3) + prompt_of(3 + 11 * (i % 4), 100 + i)
        engine.add(str(i), prompt, seed=i, max_new_tokens=6 + i, **SAMPLING[i % 3])
        for _ in range(3):
            engine.turn()
    engine.run()
    return engine.tokens


@pytest.mark.parametrize("family", some(FAMILIES, tried=["gpt_oss", "deepseek_v3"]))
def test_tokens_are_those_without_it(family: str, tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", family)
    with EngineInProcess(path, **FLAGS) as engine:
        plain = answers(engine)
    with EngineInProcess(path, **FLAGS, **LANES) as engine:
        assert answers(engine) == plain
        assert engine.parts.scheduler.counters.mixed_steps == 0


def test_retracted_requests_go_back_to_the_prefill_lane(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3")
    with EngineInProcess(path, **FLAGS) as engine:
        plain = answers(engine)
    with EngineInProcess(path, **FLAGS, **LANES, test_retract=4) as engine:
        assert answers(engine) == plain
        assert engine.parts.scheduler.counters.retractions > 0


def test_a_decode_step_ends_while_a_prompt_step_runs(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3")
    with EngineInProcess(path, **FLAGS, **LANES) as engine:
        executor = engine.parts.executor
        engine.add("running", prompt_of(5, 1), max_new_tokens=40)
        while not engine.tokens.get("running"):
            engine.turn()
        gate, runner = threading.Event(), executor.streams[1].runner
        forward = runner.forward

        def held(plan: Plan) -> Any:
            assert gate.wait(60.0)
            return forward(plan)

        runner.forward = held  # type: ignore[method-assign]
        engine.add("late", prompt_of(20, 2), max_new_tokens=2)
        try:
            while len(engine.tokens["running"]) < 30:
                assert engine.turn()
        finally:
            gate.set()
        assert "late" not in engine.tokens
        engine.run()
        assert len(engine.tokens["late"]) == 2 and len(engine.tokens["running"]) == 40


def test_both_lanes_run_other_weights_once_they_are_taken(tmp_path: Path) -> None:
    old, new = two_models(tmp_path, layers=2, hidden=64, intermediate=128)
    found = []
    for flags in ({}, LANES):
        with EngineInProcess(old, **FLAGS, **flags) as engine:
            before = dict(answers(engine, 3))
            engine.parts.scheduler.forget_prefixes()
            weights = engine.parts.weights
            weights.take(weights.read(new, when_done=lambda: None).result(), model_path=new, version=None)
            engine.tokens = {}
            found.append((before, answers(engine, 3)))
    assert found[0] == found[1] and found[0][0] != found[0][1]


@pytest.mark.skipif(linear_kernel() is None, reason="torch has threads of its own")
def test_logprobs_of_prompts_come_from_the_prefill_lane(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3", dtype="bfloat16")
    found = []
    for flags in ({"enable_mixed_chunk": False}, LANES):
        with EngineInProcess(path, **FLAGS, **flags) as engine:
            for i in range(4):
                engine.add(str(i), prompt_of(40 + i, i), logprobs=LogprobOptions(0, 2))
            engine.run()
            found.append((engine.input_logprobs, engine.logprobs))
    assert found[0] == found[1]


# ---- threads


def test_prompts_get_what_a_decode_step_leaves_and_all_threads_without_one() -> None:
    share = CoreShare(4)
    assert share.for_prompts() == share.for_decodes() == 4
    share.give(3)
    with share.prompt_step(), share.decode_step():
        assert (share.for_prompts(), share.for_decodes()) == (1, 3)
    with share.decode_step():
        assert share.for_decodes() == 4
    assert share.for_prompts() == 4


def test_where_torch_computes_a_prompt_step_leaves_the_decodes_their_threads() -> None:
    share = CoreShare(4)
    share.give(3)
    with share.prompt_step():
        assert [share.torch_for(phase) for phase in (Phase.PREFILL, Phase.DECODE)] == [1, 3]
    share.give(4)
    assert [share.torch_for(phase) for phase in (Phase.PREFILL, Phase.DECODE)] == [1, 4]


def test_prompts_wait_for_a_decode_step_that_leaves_no_thread() -> None:
    share, got = CoreShare(2), list[int]()
    share.give(2)
    prompt = threading.Thread(target=lambda: got.append(share.for_prompts()))
    with share.decode_step():
        prompt.start()
        prompt.join(0.05)
        assert prompt.is_alive() and got == []
    prompt.join(60.0)
    assert got == [2]


def test_a_share_that_changes_lets_prompts_go_on() -> None:
    share, got = CoreShare(2), list[int]()
    share.give(2)
    prompt = threading.Thread(target=lambda: got.append(share.for_prompts()))
    with share.decode_step():
        prompt.start()
        share.give(1)
        prompt.join(60.0)
    assert got == [1]


def test_prompts_threads_let_others_go_first_and_the_process_keeps_its_niceness(tmp_path: Path) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = niceness()
    with EngineInProcess(make_tiny_checkpoint(tmp_path / "model", "qwen3"), **FLAGS, **LANES) as engine:
        executor = engine.parts.executor
        found = {
            phase: one.call(niceness)
            for phase, one in zip((Phase.DECODE, Phase.PREFILL), executor.streams, strict=True)
        }
    assert found == {Phase.DECODE: own, Phase.PREFILL: min(19, own + PROMPT_NICENESS)} and niceness() == own


@pytest.mark.skipif(linear_kernel() is None, reason="no C kernel")
def test_each_kernel_of_a_thread_asks_how_many_threads_make_it(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3", dtype="bfloat16")
    with EngineInProcess(path, **FLAGS, **LANES) as engine:
        executor, asked = engine.parts.executor, {phase: 0 for phase in Phase}

        def counted(phase: Phase) -> None:
            def count() -> int:
                asked[phase] += 1
                return 1

            executor.streams[STREAMS[phase]].call(lambda: tape.let_count(count))

        for phase in Phase:
            counted(phase)
        engine.answer("r", prompt_of(16, 1), max_new_tokens=4)
    assert asked[Phase.PREFILL] > 5 and asked[Phase.DECODE] > 0


# ---- What --enable-pdmux changes, and what it refuses at start, each by the names of both flags.

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"enable_mixed_chunk": True}, "not with --enable-mixed-chunk: "),
    ({"stream": "inline"}, "not with --stream inline: "),
    ({"tp_size": 2}, "not with --tp-size 2: "),
    ({"pp_size": 2}, "not with --pp-size 2: "),
    ({"enable_lora": True}, "not with --enable-lora: "),
    ({"lora_paths": ("a=/b",)}, "not with --lora-paths: "),
    ({"enable_hierarchical_cache": True}, "not with --enable-hierarchical-cache: "),
    ({"speculative_algorithm": "NGRAM"}, "not with --speculative-algorithm NGRAM: "),
]


def resolved(path: str = WIDE_MODEL_PATH, *, cuda: bool = False, **flags: Any) -> EngineConfig:
    return resolve(EngineConfig(model_path=path, **flags), load_model_config(path), cuda=cuda)


@pytest.mark.parametrize(("flags", "said"), REFUSED)
def test_what_two_lanes_cannot_share_is_refused_by_name(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"--enable-pdmux: {said}.*leave one of them out"):
        resolved(enable_pdmux=True, **flags)


def test_a_recurrent_model_is_refused(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3_next")
    with pytest.raises(ConfigError, match=r"--enable-pdmux: not with the recurrent layers of --model-path .*/model"):
        resolved(path, enable_pdmux=True)


def test_an_objective_without_lanes_is_refused() -> None:
    with pytest.raises(ConfigError, match="--pdmux-itl: is the objective of --enable-pdmux; give both"):
        resolved(pdmux_itl_s=0.05)


@pytest.mark.parametrize(
    ("mode", "backup", "said"),
    [
        ("prefill", "recompute", "--disaggregation-mode prefill"),
        ("decode", "host", "--disaggregation-decode-retraction-backup host"),
    ],
)
def test_roles_whose_copies_have_an_order_refuse_it(mode: str, backup: str, said: str) -> None:
    engine = EngineConfig(model_path=DEFAULT_MODEL_PATH, num_threads=1, enable_pdmux=True)
    disagg = DisaggConfig(disaggregation_mode=mode, disaggregation_decode_retraction_backup=backup)
    with pytest.raises(ConfigError, match=f"--enable-pdmux: not with {said}, .*leave one of them out"):
        plan_session(engine=engine, server=ServerConfig(), disagg=disagg)


def test_decodes_have_steps_of_their_own_on_a_stream_that_runs_beside_the_loop() -> None:
    config = resolved(enable_pdmux=True, device="cpu")
    assert (config.enable_mixed_chunk, config.stream, depth(config)) == (False, "threaded", 2)
    assert limits(config).multiplexed and not limits(config).mixed_chunk
    assert not limits(resolved(device="cpu")).multiplexed


@pytest.mark.parametrize(("device", "waits"), [("cpu", True), ("cuda", False)])
def test_prompts_wait_for_decodes_on_a_cpu_alone(device: str, waits: bool) -> None:
    share = lane_share(resolved(enable_pdmux=True, device=device, cuda=True), parts=1)
    share.note(0.3)
    assert (share.due_s(0.0) > 0) == waits
