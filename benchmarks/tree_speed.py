"""Chains and trees of drafts in an engine, by a drafter that is right as often as is said: output tokens a second of plain decoding.

usage: python -m benchmarks.tree_speed [--layers 28] [--hidden 1024] [--topk 1 2 4] [--steps 5] [--batches 1 4] [--tokens 160] [--turns 3]
           [--output FILE]

A random model in bf16 and a random EAGLE layer cost what they cost; what the layer guesses is put in place of its own guesses. A place is
easy or hard, and the layer is as sure as it is right, rank by rank (PLACES): first guesses are right in 79 %, as those of a good drafter on
text that repeats nothing (benchmarks/draft_trees.py). Places are the same for all. Steps learn costs and chances as while serving.
Figures are CPU time of one thread, so other work on the machine counts little; medians of turns, in which the ways take turns.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from deploy.bench import environment
from deploy.bench.report import table
from engine.core.plan import PlanItem
from engine.executor.guess_pass import Drafted, GuessPass
from engine.kernels.linear import linear_kernel
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.models.tiny_drafters import make_eagle_of

PROMPT, HEAD, VOCAB = 256, 128, 32768
WARM = 48  # tokens of each request that are not timed: tapes are recorded, costs and chances learned
EASY = 0.7  # of the places
PLACES = {
    True: (0.95, 0.025, 0.01, 0.005),
    False: (0.42, 0.22, 0.1, 0.06),
}  # easy or not: how often each guess is right
Answers = Mapping[str, Sequence[int]]


class Known:
    """What the guesses come to. `answers`: by request."""

    def __init__(self, answers: Answers, prompts: Mapping[str, int]) -> None:
        self._answers = answers
        self._prompts = prompts
        self._right: dict[str, int | None] = {}  # of each request, the path whose drafts are right so far

    def guesses(self, items: Sequence[PlanItem], width: int, number: int) -> tuple[Tensor, Tensor]:
        """As GuessPass._guesses."""
        topk = items[0].topk
        tokens = torch.zeros(len(items), width, topk, dtype=torch.int64)
        confidences = torch.zeros(len(items), width, topk)
        for n, item in enumerate(items):
            at = item.start + 1 + number - self._prompts[item.rid]
            answer = self._answers[item.rid]
            if number == 0:
                self._right[item.rid] = 0
            for path in range(width):
                draw = random.Random(f"{item.rid} {at} {path if path != self._right[item.rid] else 'right'}")
                shares = PLACES[draw.random() < EASY]
                confidences[n, path] = torch.tensor(shares[:topk])
                tokens[n, path] = torch.tensor([draw.randrange(VOCAB) for _ in range(topk)])
                rank = draw.choices(range(len(shares) + 1), [*shares, 1 - sum(shares)])[0]
                if path == self._right[item.rid] and rank < topk and at < len(answer):
                    tokens[n, path, rank] = answer[at]
        return tokens, confidences

    def follow(self, items: Sequence[PlanItem], drafted: Drafted, number: int) -> None:
        """Find the right path among those of the next pass."""
        for n, item in enumerate(items):
            at, path = item.start + 1 + number - self._prompts[item.rid], self._right[item.rid]
            answer, following = self._answers[item.rid], None
            for place, candidate in enumerate(drafted.paths[n].tolist()):
                token = int(drafted.tokens[n].flatten()[candidate])
                if candidate // items[0].topk == path and at < len(answer) and token == answer[at]:
                    following = place
            self._right[item.rid] = following


@contextmanager
def guessing(known: Known) -> Iterator[None]:
    own_guesses, own_pass = GuessPass._guesses, GuessPass._pass

    def guesses(passes: GuessPass, drafter: Any, out: Tensor, paths: Any, number: int) -> tuple[Tensor, Tensor]:
        own_guesses(passes, drafter, out, paths, number)  # its cost
        return known.guesses(paths.items, paths.width, number)

    def a_pass(passes: GuessPass, drafter: Any, paths: Any, number: int) -> Any:
        drafted, following = own_pass(passes, drafter, paths, number)
        known.follow(paths.items, drafted, number)
        return drafted, following

    GuessPass._guesses, GuessPass._pass = guesses, a_pass  # type: ignore[method-assign]
    try:
        yield
    finally:
        GuessPass._guesses, GuessPass._pass = own_guesses, own_pass  # type: ignore[method-assign]


def run(
    path: str, *, batch: int, tokens: int, flags: Mapping[str, Any], answers: Answers
) -> tuple[Answers, dict[str, float]]:
    prompts = {str(i): prompt_of(PROMPT, i) for i in range(batch)}
    common = {"num_threads": 1, "max_running_requests": 16 * batch, "grammar_backend": "none", "context_length": 1024}
    lengths = {rid: len(prompt) for rid, prompt in prompts.items()}
    with guessing(Known(answers, lengths)), EngineInProcess(path, **common, **flags) as engine:
        scheduler = engine.parts.scheduler
        for rid, prompt in prompts.items():
            engine.add(rid, prompt, max_new_tokens=tokens)
        while scheduler.counters.generation_tokens < WARM * batch:
            engine.turn()
        done, verified, drafts, accepted = figures = _figures(scheduler.counters)
        started = time.thread_time()
        while engine.turn():
            pass
        seconds = time.thread_time() - started
        done, verified, drafts, accepted = (
            now - before for now, before in zip(_figures(scheduler.counters), figures, strict=True)
        )
        found = {
            "tokens_s": done / seconds,
            "accepted": accepted / max(1, verified),
            "rows": drafts / max(1, verified),
        }
        return engine.tokens, found


def _figures(counters: Any) -> tuple[int, int, int, int]:
    return counters.generation_tokens, counters.verified_runs, counters.drafts, counters.accepted_drafts


def name_of(topk: int) -> str:
    return "plain" if topk == 0 else "chain" if topk == 1 else f"tree of {topk}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--topk", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    assert linear_kernel() is not None, "products of torch depend on the batch: answers would differ"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tandem-trees-") as folder:
        path = make_tiny_checkpoint(
            Path(folder) / "model",
            "qwen3",
            dtype="bfloat16",
            vocab_size=VOCAB,
            num_hidden_layers=args.layers,
            hidden_size=args.hidden,
            intermediate_size=3 * args.hidden,
            num_attention_heads=args.hidden // HEAD * 2,
            num_key_value_heads=args.hidden // HEAD,
            head_dim=HEAD,
        )
        eagle = make_eagle_of(path, Path(folder) / "eagle")
        cells = [(batch, turn) for batch in args.batches for turn in range(args.turns)]
        for batch, turn in tqdm(cells, unit="turn", disable=None):
            answers: Answers = {}
            ways = [0, *args.topk] if turn % 2 == 0 else [0, *reversed(args.topk)]
            for topk in ways:
                own: dict[str, Any] = {}
                if topk:
                    own = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": eagle}
                    own |= {"speculative_num_steps": args.steps, "speculative_eagle_topk": topk}
                said, found = run(path, batch=batch, tokens=args.tokens, flags=own, answers=answers)
                assert not answers or said == answers, "drafts change an answer"
                answers = said
                rows.append({"batch": batch, "turn": turn, "topk": topk, **found})
    print(render(rows))
    if args.output is not None:
        args.output.write_text(json.dumps({"environment": environment.describe(), "rows": rows}, indent=1) + "\n")


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = list(dict.fromkeys((row["batch"], row["topk"]) for row in rows))

    def middle(batch: int, topk: int, what: str) -> float:
        return median(row[what] for row in rows if (row["batch"], row["topk"]) == (batch, topk))

    lines = [
        [
            str(batch),
            name_of(topk),
            f"{middle(batch, topk, 'tokens_s'):.1f}",
            f"{middle(batch, topk, 'tokens_s') / middle(batch, 0, 'tokens_s'):.2f}",
            f"{1 + middle(batch, topk, 'accepted'):.2f}",
            f"{1 + middle(batch, topk, 'rows'):.1f}",
        ]
        for batch, topk in cells
    ]
    return table(["requests", "drafts", "tokens/s of a core", "of plain", "tokens a verify step", "its rows"], lines)


if __name__ == "__main__":
    main()
