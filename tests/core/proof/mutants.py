"""Plants bugs in the core, one at a time in a copy of the tree, and sees the stories find each: `make mutants`.

A mutant that survives means that the proof does not look there: status 1, and its name.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parents[3]
STEPS, SEEDS, TRIES_S = 60_000, (1, 2, 3), 240.0
FOLDERS = ("engine", "disagg", "transfer_backends", "bootstrap_server", "tests")


@dataclass(frozen=True)
class Mutant:
    """In `file`, `old` (there exactly once) becomes `new`."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "memory goes back while a step may write it",
        "engine/core/stages.py",
        "settled = [r for r in self.draining if r.inflight == 0]\n"
        "        self.draining = [r for r in self.draining if r.inflight > 0]",
        "settled, self.draining = self.draining, []",
    ),
    Mutant(
        "the wasted step's token is told",
        "engine/core/results.py",
        "            if request.finish is None:\n                self._apply",
        "            if request.finish is None or not request.prefill_only:\n                self._apply",
    ),
    Mutant(
        "a draw in flight is not counted",
        "engine/core/request.py",
        "return self.max_new_tokens - len(self.output_ids) - self.pending",
        "return self.max_new_tokens - len(self.output_ids)",
    ),
    Mutant(
        "an evicted leaf's parent is never evicted",
        "engine/core/radix_cache.py",
        "        self._note_leaf(node.parent)\n        parent, node.parent",
        "        parent, node.parent",
    ),
    Mutant(
        "the prefix is not locked while others may evict",
        "engine/core/memory.py",
        "        self.cache.lock(match.node)\n        need = self.allocator.pages_for(request.num_tokens) - len(match.pages)\n        if need + self",
        "        need = self.allocator.pages_for(request.num_tokens) - len(match.pages)\n        if need + self",
    ),
    Mutant(
        "a duplicate page is forgotten",
        "engine/core/memory.py",
        "        request.dup_pages += request.pages[request.shared_pages : inserted.existing]\n",
        "",
    ),
    Mutant(
        "a page is shared before its last token is computed",
        "engine/core/memory.py",
        "whole = min(request.computed_len, request.num_tokens) // self.allocator.page_size",
        "whole = -(-min(request.computed_len, request.num_tokens) // self.allocator.page_size)",
    ),
    Mutant(
        "all of the prompt may come from the cache",
        "engine/core/memory.py",
        "limit = min(request.num_tokens - 1, unseen_from(request))",
        "limit = min(request.num_tokens, unseen_from(request))",
    ),
    Mutant(
        "a split node forgets its lock",
        "engine/core/radix_cache.py",
        "upper.locks, upper.last_used, upper.uses = node.locks, node.last_used, node.uses",
        "upper.last_used, upper.uses = node.last_used, node.uses",
    ),
    Mutant(
        "a match looks at the first page of an edge alone",
        "engine/core/radix_cache.py",
        "        low, high = 0, len(part) // self._page_size",
        "        return len(part) // self._page_size\n        low, high = 0, len(part) // self._page_size",
    ),
    Mutant(
        "an evicted page is free twice",
        "engine/core/page_allocator.py",
        "        self._move(pages, CACHED, FREE)\n        self._give_back(pages)",
        "        self._move(pages, CACHED, FREE)\n        self._give_back(pages)\n        self._give_back(pages[:1])",
    ),
    Mutant(
        "quarantined pages are free at once",
        "engine/core/page_allocator.py",
        "        self._move(pages, HELD, QUARANTINED)",
        "        self._move(pages, HELD, FREE)\n        self._give_back(pages)",
    ),
    Mutant(
        "the chunk is cut inside a page",
        "engine/core/prefill_adder.py",
        "return tokens // self._limits.page_size * self._limits.page_size",
        "return tokens - 1 if self._limits.page_size > 1 else tokens",
    ),
    Mutant(
        "a step takes one prompt too many",
        "engine/core/prefill_adder.py",
        "self.num_requests == limit",
        "(limit is not None and self.num_requests > limit)",
    ),
    Mutant(
        "the batch stays full when memory comes back",
        "engine/core/departures.py",
        "        self._stages.batch_is_full = False\n",
        "",
    ),
    Mutant(
        "a retracted request forgets a token",
        "engine/core/departures.py",
        "        self._give_back(request)\n        request.input_logprobs.clear()",
        "        self._give_back(request)\n        del request.output_ids[-1:]\n        request.input_logprobs.clear()",
    ),
    Mutant(
        "prompt logprobs are told twice after a retraction",
        "engine/core/departures.py",
        "        request.input_logprobs.clear()",
        "        request.input_logprobs",
    ),
    Mutant(
        "a preempted request's row is not closed",
        "engine/core/departures.py",
        "        if request.slot is not None:\n            self._table.close(request)",
        "        if request.slot is not None and request.finish is not None:\n            self._table.close(request)",
    ),
    Mutant(
        "a copy comes back one page short",
        "engine/core/backups.py",
        "self._loads.append(PageLoad(request.serial, start, request.pages[start:count]))",
        "self._loads.append(PageLoad(request.serial, start, request.pages[start : count - 1]))",
    ),
    Mutant(
        "pages leave before their copy is made",
        "engine/core/backups.py",
        "        self._copying[request.serial] = request\n        request.inflight += 1\n        self.saved_tokens",
        "        self._copying[request.serial] = request\n        self.saved_tokens",
    ),
    Mutant(
        "other weights find old prefixes",
        "engine/core/scheduler.py",
        "        self.backups.forget_all(self.stages.live.values())\n        self.memory.forget_prefixes(files=False)",
        "        self.backups.forget_all(self.stages.live.values())",
    ),
    Mutant(
        "a mask is made one token too early",
        "engine/core/planning.py",
        "request.grammar is not None and request.pending > 1",
        "request.grammar is not None and request.pending > 2",
    ),
    Mutant(
        "the length is checked behind the stop token",
        "engine/core/finish.py",
        '    if len(request.output_ids) >= request.max_new_tokens:\n        return FinishReason(kind="length")\n'
        "    if request.grammar is not None and request.grammar.ended:\n        return _grammar_end(request)\n"
        "    if reason := _stop_token(request):\n"
        "        return reason\n",
        "    if request.grammar is not None and request.grammar.ended:\n        return _grammar_end(request)\n"
        "    if reason := _stop_token(request):\n"
        "        return reason\n    if len(request.output_ids) >= request.max_new_tokens:\n"
        '        return FinishReason(kind="length")\n',
    ),
    Mutant(
        "a stop counts before the least length",
        "engine/core/finish.py",
        "    if not request.output_ids or len(request.output_ids) < sampling.min_new_tokens:\n        return None\n    last",
        "    if not request.output_ids:\n        return None\n    last",
    ),
    Mutant(
        "a hidden state is told twice after a retraction",
        "engine/core/hidden.py",
        "first, request.hidden_launched = max(start, request.hidden_launched), max(end, request.hidden_launched)",
        "first, request.hidden_launched = start, max(end, request.hidden_launched)",
    ),
    Mutant(
        "a preemption does not ask whether it frees enough",
        "engine/core/preemption.py",
        "            if suffice(victims):\n                return _only_needed",
        "            if victims:\n                return _only_needed",
    ),
    Mutant(
        "decode preempts for a request and gives the memory to none",
        "engine/core/scheduler.py",
        "        return self.memory.reserve(request, reserved_pages=self._reserved_pages(request, []))\n\n    def _preempt_for",
        "        return False\n\n    def _preempt_for",
    ),
    Mutant(
        "a shared page counts as freed although another request reads it",
        "engine/core/memory.py",
        "        available = self.available + sum(len(r.own_pages()) for r in without)",
        "        available = self.available + sum(len(r.pages) for r in without)",
    ),
    Mutant(
        "one more gets a row than there are",
        "engine/core/planning.py",
        "        late = {r.rid for r in rowless[self._table.num_free :]}",
        "        late = {r.rid for r in rowless[self._table.num_free + 1 :]}",
    ),
    Mutant(
        "the largest request is counted with a page too many",
        "engine/core/memory.py",
        "return self.allocator.pages_for(known + num_tokens) - self.allocator.pages_for(known)",
        "return self.allocator.pages_for(num_tokens)",
    ),
    Mutant(
        "prefill frees what a peer still reads",
        "disagg/prefill_role.py",
        "        if not entry.sender.released():\n            return\n",
        "",
    ),
    Mutant(
        "decode reuses what a peer may still write",
        "disagg/decode_role.py",
        "        if entry.receiver.drained():\n            self._quarantine.close",
        "        if True:\n            self._quarantine.close",
    ),
    Mutant(
        "the last chunk goes without the pages before it",
        "disagg/prefill_role.py",
        "            entry.sent_pages = whole\n",
        "            entry.sent_pages = whole + 1\n",
    ),
)


def planted(mutant: Mutant, folder: Path) -> None:
    """A copy of the tree in `folder`, with the bug."""
    ignore = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.json")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    file = folder / mutant.file
    file.write_text(with_bug(mutant, file.read_text()))


def with_bug(mutant: Mutant, text: str) -> str:
    assert text.count(mutant.old) == 1, f"{mutant.name}: {mutant.file} holds the text {text.count(mutant.old)} times"
    return text.replace(mutant.old, mutant.new)


def found(mutant: Mutant) -> str:
    """The error by which the stories of any seed see `mutant`; "" when they do not."""
    with tempfile.TemporaryDirectory() as folder:
        planted(mutant, Path(folder))
        return next((error for seed in SEEDS if (error := _found_by(seed, folder))), "")


def _found_by(seed: int, folder: str) -> str:
    command = [sys.executable, "-m", "tests.core.proof.soak", "--no-shrink", "--seed", str(seed), "--steps", str(STEPS)]
    env = {**os.environ, "PYTHONPATH": folder}
    try:
        run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TRIES_S)
    except subprocess.TimeoutExpired:
        return "no end"
    errors = [line for line in run.stderr.splitlines() if "Error" in line and not line.startswith(" ")]
    return (errors or ["status"])[0][:160] if run.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.core.proof.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="those whose name holds this")
    parser.add_argument("--report", type=Path, default=None)
    args = parser.parse_args()
    report: dict[str, dict[str, object]] = {}
    for mutant in tqdm([m for m in MUTANTS if args.only in m.name], unit="bug"):
        started_s = time.monotonic()
        error = found(mutant)
        report[mutant.name] = {"found": error, "seconds": round(time.monotonic() - started_s, 1)}
        tqdm.write(f"{'found' if error else 'SURVIVED'}: {mutant.name}: {error}")
    if args.report is not None:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(json.dumps(report, indent=2) + "\n")
    return int(any(not entry["found"] for entry in report.values()))


if __name__ == "__main__":
    sys.exit(main())
