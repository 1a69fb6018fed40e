"""Run by test_decode_graphs.py with TRITON_INTERPRET=1 (it must be set before kernels are defined).

The whole engine with decode graphs (eager ones: the same work over the same buffers, each time anew) beside one without.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from benchmarks import random_model
from engine.device.step_memory import LocalMachine
from engine.executor.graphs import DecodeGraphs, PrefillGraphs, T
from engine.executor.step_part import SampledForward
from engine.kernels.triton import sample
from engine.kernels.triton.recurrent import TritonRecurrent
from engine.layers import recurrence
from engine.layers.recurrence import StepStates
from engine.models.load import load_model
from tests.attention.triton.triton_experts import fused
from tests.engine.device.late_copies import copy_late
from tests.engine.drafts.drafters import always, fared
from tests.engine.engine_in_process import EngineInProcess
from tests.engine.three_requests import PROMPTS, SAMPLING, run, two_models
from tests.grammar.fixed import Fixed
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.models.tiny_seeing import FAMILIES, PromptMaker, make_seeing_checkpoint

LENGTHS = {"a": 5, "b": 2, "c": 4}  # the batch shrinks from 3 to 1
SMALL: dict[str, Any] = {"dtype": "float32", "max_running_requests": 4, "max_total_tokens": 160}
UNCACHED: dict[str, Any] = {**SMALL, "disable_radix_cache": True}


def main() -> None:
    torch.set_num_threads(1)
    sample.PARTS, sample.TILE, sample.ROW_TILE = 1, 256, 256
    with tempfile.TemporaryDirectory(prefix="tandem-graphs-") as folder:
        random_model.HEADS, random_model.KV_HEADS = 4, 2  # the interpreter is slow
        models = two_models(Path(folder), layers=1, hidden=64, intermediate=64)
        check(*models)
        check_prompts(models[0])
        check_loads(models[0])
        check_drafter(models[0])
        check_drafter(models[0], topk=2)
        check_drafter(models[0], steps=2, stream="threaded")
        check_images(Path(folder) / "seeing")
        check_experts(Path(folder) / "experts")
        check_codes(models[0])
        check_codes(make_tiny_checkpoint(Path(folder) / "latents", "deepseek_v3", num_hidden_layers=1))
        for family, layers in (("qwen3_5_text", 2), ("falcon_h1", 1)):
            check_recurrent(make_tiny_checkpoint(Path(folder) / family, family, num_hidden_layers=layers))
        check_recurrent_drafts(str(Path(folder) / "qwen3_5_text"))


def every_third(vocab_size: int) -> Fixed:
    """A grammar: token number n is n modulo 3. Its masks come late at depth 2."""
    return Fixed(1000, lambda before, token: token % 3 == len(before) % 3, vocab_size=vocab_size)


class CountingCapture:
    """Records nothing and does the work anew: what a graph computes."""

    def __init__(self) -> None:
        self.replays = self.steps = 0  # of any work, and of whole steps
        self.logits: set[int] = set()  # where they lie

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        def replay() -> T:
            self.replays += 1
            out = work()
            self.steps += isinstance(out, tuple)
            if isinstance(out, tuple) and isinstance(out[0], SampledForward):
                self.logits.add(out[0].recorded.data_ptr())
            return out

        return replay


def plain_engine(path: str, **flags: Any) -> EngineInProcess:
    return EngineInProcess(path, attention_backend="torch", **flags)


def recording(
    path: str, capture: CountingCapture, *, records: Mapping[str, bool] = MappingProxyType({}), **flags: Any
) -> EngineInProcess:
    machine = LocalMachine(capture=lambda: capture, **records)
    return EngineInProcess(path, attention_backend="triton", machine=machine, **flags)


def check(folder: str, other: str) -> None:
    plain = [plain_engine(path, **UNCACHED) for path in (folder, other)]
    (expected, expected_logprobs), (expected_of_other, _) = (run(engine, LENGTHS) for engine in plain)
    capture = CountingCapture()
    engine = recording(folder, capture, depth=2, stream="threaded", records={"prefills": False}, **UNCACHED)
    graphs, pool = engine.recorded(DecodeGraphs), engine.parts.pool
    assert graphs is not None and graphs.sizes == [1, 2, 4], graphs
    pool.k(0)[0] = 7.0
    found, logprobs = run(engine, LENGTHS)
    assert found == expected, (found, expected)
    assert logprobs == pytest.approx(expected_logprobs, rel=0.0, abs=1e-5)
    assert capture.replays == max(LENGTHS.values()) - 1, capture.replays
    assert len(capture.logits) == 1, "each size has logits of its own, which stay taken beside the others"
    assert (pool.k(0)[0, 0] != 7.0).all(), "nothing was padded"
    # masked steps are sampled behind the graph, and count the tokens of a penalty once
    masked = [run(e, LENGTHS, grammars={"a": every_third(e.model.vocab_size)})[0] for e in (engine, plain[0])]
    assert masked[0] == masked[1] != expected and len(masked[0]["a"]) == LENGTHS["a"], masked
    model = load_model(other, engine.model, dtype="float32", device="cpu", progress=False)
    engine.parts.weights.take(model, model_path=other, version=None)
    assert run(engine, LENGTHS)[0] == expected_of_other != expected, "the graphs of other weights were replayed"
    for used in (engine, *plain):
        used.close()


def check_prompts(folder: str) -> None:
    """Chunks of 16 tokens, of one request or several: prompts that begin, go on behind a prefix and end in a step."""
    plain = plain_engine(folder, chunked_prefill_size=16, **SMALL)
    expected = run(plain, dict.fromkeys(PROMPTS, 1))
    capture, marks = CountingCapture(), list[tuple[int, int]]()
    engine = recording(folder, capture, records={"decodes": False}, chunked_prefill_size=16, **SMALL)
    device, pool = engine.parts.device, engine.parts.pool
    assert engine.recorded(DecodeGraphs) is None and engine.recorded(PrefillGraphs) is not None
    device.layers.watch([1], lambda: marks.append(device.layers.reached()))
    pool.k(0)[0] = 7.0
    found, logprobs = run(engine, dict.fromkeys(PROMPTS, 1))
    assert found == expected[0], (found, expected)
    assert logprobs == pytest.approx(expected[1], rel=0.0, abs=1e-5)
    num_steps = len(marks) // 2
    assert capture.replays == num_steps >= 2, (capture.replays, marks)
    assert [layers for _, layers in marks] == [0, 1] * num_steps, marks
    assert (pool.k(0)[0, 0] != 7.0).all(), "nothing was padded"
    for used in (engine, plain):
        used.close()


def check_loads(folder: str) -> None:
    """A recorded prompt whose prefix comes from the host, on streams that run as late as they may."""
    flags = {"dtype": "float32", "max_running_requests": 2, "max_total_tokens": 64, "enable_hierarchical_cache": True}
    capture, prompt = CountingCapture(), list(range(20, 45))
    with recording(folder, capture, records={"decodes": False}, page_size=8, **flags) as engine:
        copy_late(engine)
        for rid, asked in (("first", prompt), ("other", list(range(60, 120))), ("again", prompt)):
            engine.answer(rid, asked, max_new_tokens=1)
        assert engine.cached == {"first": 0, "other": 0, "again": 24}, engine.cached
        assert engine.tokens["again"] == engine.tokens["first"], "a graph was replayed before its prefix was there"
        assert capture.replays == 3, capture.replays


def check_drafter(folder: str, *, topk: int = 1, steps: int | None = None, **flags: Any) -> None:
    """Recorded verify steps and prompts, behind which a drafter, the model itself, keeps what it needs of their tokens."""

    def ask(engine: EngineInProcess) -> dict[str, list[int]]:
        for rid in ("a", "c"):
            engine.add(rid, PROMPTS[rid], max_new_tokens=6, seed=3, **SAMPLING[rid])
        engine.run()
        return engine.tokens

    capture = CountingCapture()
    own = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": folder,
        "speculative_num_steps": steps or topk,
    }
    own |= {"speculative_eagle_topk": topk, **flags}
    with plain_engine(folder, **UNCACHED) as plain, recording(folder, capture, **UNCACHED, **own) as engine:
        always(engine.parts.scheduler)
        assert ask(engine) == ask(plain)
        how, overlapped = fared(engine), engine.seen.overlapped
    assert how.accepted > 3 and capture.replays > 2, (how, capture.replays)
    assert (how.drafts > how.accepted) == (topk > 1), how  # of two guesses for one place one is wrong
    assert (overlapped > 3) == bool(flags), overlapped


def check_images(folder: Path) -> None:
    """Recorded decode steps of requests behind images, whose RoPE positions are others than their places, beside one of text."""
    text = {**FAMILIES["qwen2_5_vl"]["text_config"], "num_hidden_layers": 1}
    path = make_seeing_checkpoint(folder, "qwen2_5_vl", text_config=text)
    prompt = PromptMaker().text(4).image(4, 6).text(3).done()

    def ask(engine: EngineInProcess) -> dict[str, list[int]]:
        for rid, images in (("sees", tuple(prompt.images)), ("reads", ())):
            engine.add(rid, prompt.ids, max_new_tokens=5, wanted={"images": images})
        engine.run()
        return engine.tokens

    capture = CountingCapture()
    with plain_engine(path, **UNCACHED) as plain, recording(path, capture, **UNCACHED) as engine:
        right = ask(plain)
        assert ask(engine) == right and right["sees"] != right["reads"], right
    assert capture.replays >= 4, capture.replays


def check_codes(path: str) -> None:
    """KV of 8 bits, by prompts and decode steps."""
    flags = {**UNCACHED, "kv_cache_dtype": "fp8_e4m3"}
    capture = CountingCapture()
    with plain_engine(path, **flags) as plain, recording(path, capture, **flags) as engine:
        assert run(engine, LENGTHS)[0] == run(plain, LENGTHS)[0]
        assert all(spec.fp8 for spec in engine.parts.pool.specs)
    assert capture.replays == max(LENGTHS.values()), capture.replays


def check_experts(folder: Path) -> None:
    """Prompts and decode steps of a mixture by Triton's kernels: rows of padding choose experts, and are not counted."""
    path = make_tiny_checkpoint(folder, "qwen3_moe", num_hidden_layers=1)
    capture = CountingCapture()
    with fused():
        engine = recording(path, capture, **UNCACHED)
    with plain_engine(path, **UNCACHED) as plain, engine:
        assert run(engine, LENGTHS)[0] == run(plain, LENGTHS)[0]
        found, expected = (each.parts.executor.runner.expert_loads() for each in (engine, plain))
    assert capture.replays == max(LENGTHS.values()) and found == expected, (capture.replays, found, expected)


class WarmCapture(CountingCapture):
    """Runs the work before it records it, as CUDA's warm-ups do."""

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        work()
        return super().capture(work)


class ForgetfulCapture(CountingCapture):
    """What recurrent layers keep is only what a replay returns, and the next replay overwrites that."""

    states: tuple[StepStates, ...] = ()

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        replay_once, kept = super().capture(work), list[torch.Tensor]()

        def replay() -> T:
            for product in kept:
                product.fill_(torch.nan)
            out: Any = replay_once()
            kept[:] = out[2].values()
            for states in self.states:
                states.products = {}
            return out  # type: ignore[no-any-return]

        return replay


def check_recurrent(path: str) -> None:
    """Recorded decode steps of requests with recurrent states, padded; weights are recorded again between two of them."""
    recurrence.recurrent_on_gpu = lambda _: None
    capture = WarmCapture()
    with recording(path, capture, **UNCACHED) as engine:
        right = run(engine, LENGTHS)[0]
    assert not capture.replays, "C kernels know their rows from the host"
    recurrence.recurrent_on_gpu = lambda _: TritonRecurrent()  # type: ignore[assignment, return-value]
    with recording(path, capture, **UNCACHED) as engine:
        executor = engine.parts.executor
        for rid, count in LENGTHS.items():
            engine.add(rid, PROMPTS[rid], max_new_tokens=count, seed=3, **SAMPLING[rid])
        for _ in range(4):
            engine.turn()
        executor.call(executor.streams[0].runner.running.record)
        assert len(engine.tokens["a"]) < LENGTHS["a"], "all have ended"
        engine.run()
    assert engine.tokens == right, (engine.tokens, right)
    assert capture.replays == max(LENGTHS.values()) - 1, capture.replays


def check_recurrent_drafts(path: str) -> None:
    """Steps with drafts, too; rejected ones are rolled back by what a graph has kept."""
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 3, "logit_bias": {30: 40.0, 31: 40.0}, "max_new_tokens": 10}
    drafts = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3}
    capture, found = ForgetfulCapture(), list[list[int]]()
    for flags in ({}, drafts):
        with recording(path, capture, **UNCACHED, **flags) as engine:
            capture.states = engine.parts.executor.streams[0].runner.running.model.states
            if flags:
                always(engine.parts.scheduler)
            engine.answer("a", [30, 31, 30], **asked)
            found.append(engine.tokens["a"])
            how = fared(engine)
    assert found[0] == found[1] and 0 < how.accepted < how.drafts, (found, how)
    assert capture.replays == 9 + 9 - how.accepted, (capture.replays, how)


if __name__ == "__main__":
    main()
    sys.exit(0)
