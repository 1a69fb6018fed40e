"""What drafts cost and bring a model with recurrent states: decode without, with drafts that are all right, and all wrong.

usage: python -m benchmarks.drafted_states [--layers 12] [--hidden 1024] [--drafts 4] [--batches 1 8] [--tokens 120] [--output FILE]

A random Qwen3.5 in bf16, three of four layers Gated DeltaNet with 16 value heads of 128 by 128: 1 MiB of state a layer. Drafts come from
answers that are known. Times are CPU time of one thread; of them, `copies`: states to shadows before a step with drafts, `back`: copies
back, and the accepted rows through convolutions and recurrences once more. Answers of all three are the same.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deploy.bench import environment
from deploy.bench.report import table
from engine.executor.states import States
from engine.kernels.linear import linear_kernel
from tests.engine.drafters import draft_from
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint

PROMPT, HEADS, HEAD = 64, 16, 128
WARM = 24  # tokens of each request that are not timed: tapes are recorded
Answers = Mapping[str, Sequence[int]]


def write_model(folder: Path, *, layers: int, hidden: int) -> str:
    return make_tiny_checkpoint(
        folder,
        "qwen3_5_text",
        dtype="bfloat16",
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=hidden // HEAD // 4 or 1,
        head_dim=HEAD,
        full_attention_interval=4,
        linear_num_key_heads=HEADS // 2,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=HEAD,
        linear_value_head_dim=HEAD,
    )


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """CPU seconds of what drafts make of states, so far: `copies`, `back`."""
    seconds, begin, rewind = {"copies": 0.0, "back": 0.0}, States.begin, States.rewind

    def timed(name: str, work: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            started = time.thread_time()
            work(*args)
            seconds[name] += time.thread_time() - started

        return call

    States.begin, States.rewind = timed("copies", begin), timed("back", rewind)  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        States.begin, States.rewind = begin, rewind  # type: ignore[method-assign]


def measure(
    path: str, *, batch: int, tokens: int, drafts: int, kind: str, answers: Answers
) -> tuple[Answers, dict[str, float]]:
    """`kind`: of drafts; "": none."""
    flags: dict[str, Any] = {"num_threads": 1, "max_running_requests": batch, "grammar_backend": "none"}
    if kind:
        flags |= {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1 + drafts}
    with EngineInProcess(path, **flags) as engine, watched() as parts:
        scheduler = engine.parts.scheduler
        if kind:
            draft_from(scheduler, answers, kind, most=drafts)
        for i in range(batch):
            engine.add(str(i), prompt_of(PROMPT, i), max_new_tokens=tokens)
        while scheduler.counters.generation_tokens < WARM * batch:
            engine.turn()
        steps, done, started = scheduler.counters.steps, scheduler.counters.generation_tokens, time.thread_time()
        parts.update(dict.fromkeys(parts, 0.0))
        while engine.turn():
            pass
        seconds = time.thread_time() - started
        steps, done = scheduler.counters.steps - steps, scheduler.counters.generation_tokens - done
        found = {"tokens_per_s": done / seconds, "ms_per_step": 1000 * seconds / steps}
        return engine.tokens, {**found, **{name: one / seconds for name, one in parts.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    assert linear_kernel() is not None, "products of torch depend on the batch: answers would differ"
    rows, report = [], dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder) / "model", layers=args.layers, hidden=args.hidden)
        for batch in args.batches:
            answers: Answers = {}
            for kind in ("", "right", "wrong"):
                asked = {"batch": batch, "tokens": args.tokens, "drafts": args.drafts}
                said, found = measure(path, kind=kind, answers=answers, **asked)
                assert not answers or said == answers, "drafts change an answer"
                answers = said
                report[f"{batch} {kind or 'none'}"] = found
                over = found["tokens_per_s"] / report[f"{batch} none"]["tokens_per_s"]
                shares = [f"{100 * found[name]:.1f} %" for name in ("copies", "back")]
                rows.append(
                    [
                        str(batch),
                        kind or "none",
                        f"{found['tokens_per_s']:.1f}",
                        f"{over:.2f}",
                        f"{found['ms_per_step']:.1f}",
                        *shares,
                    ]
                )
    print(table(["requests", "drafts", "tokens/s", "over none", "ms a step", "copies", "back"], rows))
    if args.output:
        args.output.write_text(json.dumps({"environment": environment.describe(), "found": report}, indent=2) + "\n")


if __name__ == "__main__":
    main()
