"""Where trees of drafts would pay: tokens a step of the best chain and of the best trees with as many verify rows, on real texts.

usage: python -m benchmarks.draft_trees [--tokens 128] [--texts 2] [--skips 3 6 9] [--temperatures 0 1] [--output FILE]

SmolLM2 is the model. It drafts for itself without some of its middle layers (Zhang et al., arXiv:2309.08168), which gives drafters that
are right more or less often. Texts are those of benchmarks/speculation.py that a model would write: code, a quotation, another story.

    ranks    of each token that the model sampled, in the drafter's order of tokens behind the true text. At temperature 1 that order is of
             logits plus the noise that the model samples with: a drafter's first guess is what DraftPass.draft drafts
    chain    the first guess, then the first guess behind it, and so on
    sure     the same, until the drafter is no longer sure enough
    static   the tree of the most probable ranks, one for all steps: as good as any whose shape is known before
    dynamic  at each step the most probable nodes, a number of them or down to a chance, by the drafter's own confidence (EAGLE-2, arXiv:2406.16858): at each depth the topk
             best are passed again, of each the topk best tokens are nodes. Confidences are the drafter's scores, calibrated on the ranks

Costs: a step's by its rows (`--costs`), and a pass of the drafter, which is a share of a step with one row, or with as many rows as a
depth passes. Speed is tokens a step over all of that, at the best number of rows of each shape; 1 is plain decoding.
"""

import argparse
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import msgspec
import torch
from tqdm import tqdm

from benchmarks.speculation import bodies
from deploy.bench import environment
from deploy.bench.report import table
from engine.layers.rope import Unturned
from engine.model_files.model_config import load_model_config
from engine.model_files.source import smollm2_file
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from engine.sampler.gumbel import gumbel_noise, sample_keys
from engine.text.tokenizer import load_tokenizer

KINDS = ("edit", "quote", "foreign")
ROWS = (2, 3, 4, 6, 8, 12, 16)  # of a verify step, the known one included
MOST_ROWS, DEEPEST, TOPK = ROWS[-1], 12, (2, 4)
MOST_RANK = 8
CHAIN, SURE_CHAIN = "chain", "sure chain"
SHAPES = (CHAIN, SURE_CHAIN, *(f"{kind} {topk}" for kind in ("static", "dynamic") for topk in TOPK))
LEAST = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # chances down to which nodes are taken
SEED = 11
# Relative to a step of one row, as engine/core/row_costs.py learns them while serving: of a model of 0.6B on two kinds of CPU, and of SmolLM2
# in int4 behind 1,000 tokens, where attention is much of a row.
COSTS: dict[str, dict[int, float]] = {
    "cpu, AMX": {1: 1.0, 8: 1.14, 16: 1.3, 32: 1.8},
    "cpu, AVX512": {1: 1.0, 2: 1.0, 3: 1.1, 4: 1.26, 6: 1.44, 8: 1.43, 12: 1.67, 16: 1.9, 32: 2.9},
    "SmolLM2": {1: 1.0, 2: 1.1, 3: 1.3, 4: 1.4, 6: 1.6, 8: 1.9, 12: 2.8, 16: 3.7, 32: 7.4},
    "rows are free": {1: 1.0, 32: 1.0},
}
PASSES = (0.03, 0.1, 0.25)  # of a step of one row: an EAGLE layer of 32, a small model, a larger one


class Attention:
    """K and V of a text, which the rows of a step read; `mask` [T, T] says which of its own rows each of them sees."""

    def __init__(self) -> None:
        self.k: dict[int, torch.Tensor] = {}
        self.v: dict[int, torch.Tensor] = {}
        self.length = 0
        self.mask: torch.Tensor | None = None

    def __call__(self, layer: int, new: Unturned) -> torch.Tensor:
        q, k, v = new.turned()
        rows, group = len(q), q.shape[1] // k.shape[1]
        if layer in self.k:
            k, v = (torch.cat((kept[: self.length], own)) for kept, own in ((self.k[layer], k), (self.v[layer], v)))
        self.k[layer], self.v[layer] = k, v
        bias = torch.zeros(rows, len(k))
        own = torch.ones(rows, rows, dtype=torch.bool).tril() if self.mask is None else self.mask
        bias[:, len(k) - rows :] = torch.where(own, 0.0, -torch.inf)
        keys, values = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q.float().transpose(0, 1), keys, values, attn_mask=bias)
        return out.transpose(0, 1).reshape(rows, -1).to(q.dtype)


def forward(model: DenseDecoder, cache: Attention, ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """[T, vocab]: logits of `ids` behind the first `cache.length` tokens of the text."""
    hidden = model.forward(torch.tensor(ids), torch.tensor(positions), cache)
    logits = model.logits(hidden)
    assert logits is not None
    return logits


def scores(logits: torch.Tensor, number: int, *, temperature: float) -> torch.Tensor:
    """What a sample is the largest of; `logits` [n, vocab] of the output token `number`."""
    if temperature == 0:
        return logits
    keys = torch.tensor(sample_keys([SEED], [number]))[:, None]
    return logits / temperature + gumbel_noise(keys, torch.arange(logits.shape[1])[None])


def answered(model: DenseDecoder, prompt: list[int], count: int, *, temperature: float) -> list[int]:
    cache, tokens = Attention(), list[int]()
    rows = forward(model, cache, prompt, range(len(prompt)))[-1:]
    for number in range(count):
        tokens.append(int(scores(rows, number, temperature=temperature).argmax()))
        cache.length = len(prompt) + number
        rows = forward(model, cache, tokens[-1:], [cache.length])
    return tokens


@dataclass
class Text:
    """An answer, and what the drafter makes of it. `order`: the scores of each of its tokens' places, as far as MOST_RANK."""

    tokens: list[int]
    cache: Attention
    prompt_len: int
    best: list[tuple[list[int], list[float]]] = field(default_factory=list)  # of each token: ids and scores, best first
    rest: list[float] = field(default_factory=list)  # logsumexp of all scores, of each token

    def rank(self, at: int) -> int:
        """Of token `at`; MOST_RANK: none of the first."""
        ids, _ = self.best[at]
        return ids.index(self.tokens[at]) if self.tokens[at] in ids else MOST_RANK


def drafted(drafter: DenseDecoder, prompt: list[int], tokens: list[int], *, temperature: float) -> Text:
    cache, whole = Attention(), prompt + tokens
    logits = forward(drafter, cache, whole[:-1], range(len(whole) - 1))[len(prompt) - 1 :]
    text = Text(tokens, cache, len(prompt))
    for number, row in enumerate(logits):
        found = scores(row[None], number, temperature=temperature)[0]
        top = found.topk(MOST_RANK)
        text.best.append((top.indices.tolist(), top.values.tolist()))
    return text


def sharpness(texts: Sequence[Text]) -> float:
    """The factor on scores whose softmax over the first ranks says best what the model sampled."""

    def loss(factor: float) -> float:
        total = 0.0
        for text in texts:
            for at in range(len(text.tokens)):
                if (rank := text.rank(at)) < MOST_RANK:
                    values = torch.tensor(text.best[at][1]) * factor
                    total -= float(values.log_softmax(0)[rank])
        return total

    return min((2.0 ** (n / 2) for n in range(-6, 7)), key=loss)


# ---- shapes


@dataclass(frozen=True)
class Found:
    """Means of a step: `tokens`, `rows` of the model, `passes` of the drafter, each of `width` rows but the first."""

    tokens: float
    rows: float
    passes: float
    width: int

    def speed(self, name: str, a_pass: float) -> float:
        passes = a_pass * (1 + (self.passes - 1) * cost(name, self.width))
        return self.tokens / (cost(name, self.rows) + passes)


Step = tuple[int, int, int]  # drafts that are right, all of them, passes


def walk(texts: Sequence[Text], step: Callable[[Text, int], Step], *, width: int) -> Found:
    """Steps begin where the one before has ended; `step(text, at)`: behind `at` known tokens."""
    steps = list[Step]()
    for text in texts:
        at = 1
        while at < len(text.tokens):
            steps.append(step(text, at))
            at += 1 + steps[-1][0]
    right, drafts, passes = (sum(column) / len(steps) for column in zip(*steps, strict=True))
    return Found(1 + right, 1 + drafts, passes, width)


def chain(text: Text, at: int, drafts: int) -> Step:
    count = 0
    while count < drafts and at + count < len(text.tokens) - 1 and text.rank(at + count) == 0:
        count += 1
    return count, drafts, drafts


def static_tree(shares: Sequence[float], nodes: int, topk: int) -> set[tuple[int, ...]]:
    """The `nodes` most probable paths of ranks, where rank r comes with `shares[r]` at each depth."""
    heap, found = [(-share, (rank,)) for rank, share in enumerate(shares[:topk])], set[tuple[int, ...]]()
    heap.sort()
    while len(found) < nodes and heap:
        chance, path = heappop(heap)
        found.add(path)
        if len(path) < MOST_ROWS:
            for rank, share in enumerate(shares[:topk]):
                heappush(heap, (chance * share, (*path, rank)))
    return found


def by_static(text: Text, at: int, tree: set[tuple[int, ...]]) -> Step:
    path: tuple[int, ...] = ()
    while at + len(path) < len(text.tokens) - 1 and (longer := (*path, text.rank(at + len(path)))) in tree:
        path = longer
    return len(path), len(tree), max(map(len, tree))


@dataclass
class Node:
    """`row`: of the step that passes it; None: nothing was drafted behind it."""

    token: int
    chance: float
    parent: "Node | None"
    depth: int
    row: int | None = None


class Dynamic:
    """Trees of one topk, or chains of topk 1, over one text. Nodes behind `at` known tokens are drafted once, and chosen in several ways."""

    def __init__(self, drafter: DenseDecoder, text: Text, *, topk: int, factor: float, temperature: float) -> None:
        self._drafter, self._text, self._topk = drafter, text, topk
        self._factor, self._temperature = factor, temperature
        self._found: dict[int, list[Node]] = {}

    def step(self, at: int, *, drafts: int, least: float) -> Step:
        """With the `drafts` most probable nodes, of a chance of `least` at least; the pass that finds none as probable is one more."""
        chosen = [node for node in self._nodes(at)[:drafts] if node.chance >= least]
        deepest = max((node.depth for node in chosen), default=0)
        passes = deepest + (len(chosen) < drafts and deepest < DEEPEST)
        here: Node | None = None
        for count in range(len(self._text.tokens) - 1 - at):
            token = self._text.tokens[at + count]
            here = next((n for n in chosen if n.parent is here and n.token == token), None)
            if here is None:
                return count, len(chosen), passes
        return max(0, len(self._text.tokens) - 1 - at), len(chosen), passes

    def _nodes(self, at: int) -> list[Node]:
        """Most probable first; a node comes behind its parent, as its chance is lower."""
        if at not in self._found:
            self._found[at] = sorted(self._drafted(at), key=lambda node: (-node.chance, node.depth))[:MOST_ROWS]
        return self._found[at]

    def _drafted(self, at: int) -> list[Node]:
        text, cache = self._text, Attention()
        cache.k, cache.v, cache.length = dict(text.cache.k), dict(text.cache.v), text.prompt_len + at
        ids, values = text.best[at]
        layer = self._children(None, 1, ids, values)
        found, passed = list(layer), list[Node]()
        for depth in range(1, DEEPEST):
            layer = sorted(layer, key=lambda node: -node.chance)[: self._topk]
            if at + depth >= len(text.tokens) - 1 or sum(n.chance > layer[0].chance for n in found) >= MOST_ROWS:
                break
            for node in layer:
                node.row = len(passed)
                passed.append(node)
            logits = self._pass(cache, passed, layer, at, depth)
            top = scores(logits, at + depth, temperature=self._temperature).topk(MOST_RANK)
            layer = [
                child
                for node, ids, values in zip(layer, top.indices.tolist(), top.values.tolist(), strict=True)
                for child in self._children(node, depth + 1, ids, values)
            ]
            found += layer
        return found

    def _pass(self, cache: Attention, passed: list[Node], layer: list[Node], at: int, depth: int) -> torch.Tensor:
        cache.mask = torch.zeros(len(passed), len(passed), dtype=torch.bool)
        for row, node in enumerate(passed):
            above: Node | None = node
            while above is not None:
                assert above.row is not None
                cache.mask[row, above.row] = True
                above = above.parent
        first = self._text.prompt_len + at
        ids, positions = [node.token for node in passed], [first + node.depth - 1 for node in passed]
        return forward(self._drafter, cache, ids, positions)[-len(layer) :]

    def _children(self, parent: Node | None, depth: int, ids: list[int], values: list[float]) -> list[Node]:
        chances = (torch.tensor(values) * self._factor).softmax(0).tolist()
        above = 1.0 if parent is None else parent.chance
        return [Node(token, above * chances[i], parent, depth) for i, token in enumerate(ids[: self._topk])]


# ---- figures


def cost(name: str, rows: float) -> float:
    known = COSTS[name]
    below, above = max(n for n in known if n <= rows), min(n for n in known if n >= rows)
    share = 0.0 if above == below else (rows - below) / (above - below)
    return known[below] + share * (known[above] - known[below])


def best_speed(found: Sequence[Found], name: str, a_pass: float) -> tuple[float, float]:
    """Return (speed, rows) of the fastest."""
    return max((one.speed(name, a_pass), one.rows) for one in found)


def of_drafter(
    drafter: DenseDecoder, answers: Sequence[tuple[list[int], list[int]]], temperature: float, *, dynamic: bool
) -> dict[str, Any]:
    texts = [drafted(drafter, prompt, tokens, temperature=temperature) for prompt, tokens in answers]
    ranks = [text.rank(at) for text in texts for at in range(1, len(text.tokens))]
    shares = [ranks.count(rank) / len(ranks) for rank in range(MOST_RANK)]
    factor = sharpness(texts)
    shapes = {CHAIN: [walk(texts, lambda text, at, n=n: chain(text, at, n - 1), width=1) for n in ROWS]}
    for topk in TOPK:
        trees = [static_tree(shares, n - 1, topk) for n in ROWS]
        shapes[f"static {topk}"] = [
            walk(texts, lambda text, at, tree=tree: by_static(text, at, tree), width=topk) for tree in trees
        ]
    for topk in (1, *TOPK) if dynamic else ():
        each = {id(text): Dynamic(drafter, text, topk=topk, factor=factor, temperature=temperature) for text in texts}
        ways = [(n - 1, 0.0) for n in ROWS if topk > 1] + [(MOST_ROWS - 1, least) for least in LEAST]
        shapes[SURE_CHAIN if topk == 1 else f"dynamic {topk}"] = [
            walk(
                texts,
                lambda text, at, each=each, drafts=drafts, least=least: each[id(text)].step(
                    at, drafts=drafts, least=least
                ),
                width=topk,
            )
            for drafts, least in ways
        ]
    return {"ranks": shares, "factor": factor, "shapes": shapes}


def render(rows: list[dict[str, Any]]) -> str:
    names = [name for name in SHAPES if name in rows[0]["shapes"]]
    begin = ["layers left out", "T", "answers"]
    header = [*begin, "first right", "second", "3 to 4", "rows", *names]
    lines = []
    for row in rows:
        ranks = row["ranks"]
        for at, n in enumerate(ROWS):
            if n not in (4, 8, 16):
                continue
            line = [str(row["skips"]), f"{row['temperature']:g}", row["kind"]]
            line += [f"{share:.2f}" for share in (ranks[0], ranks[1], sum(ranks[2:4]))]
            fixed = [row["shapes"][name][at].tokens if name != SURE_CHAIN else None for name in names]
            lines.append([*line, str(n), *("" if tokens is None else f"{tokens:.2f}" for tokens in fixed)])
    parts = ["Tokens a step with so many rows:\n\n" + table(header, lines)]
    header = [*begin, "rows cost", "a pass", *(f"{name} (rows)" for name in names), "best tree over best chain"]
    lines = []
    for row in rows:
        for name in COSTS:
            for a_pass in PASSES:
                speeds = {shape: best_speed(row["shapes"][shape], name, a_pass) for shape in names}
                chains = max(speeds[shape][0] for shape in names if shape in (CHAIN, SURE_CHAIN))
                trees = max(speeds[shape][0] for shape in names if shape not in (CHAIN, SURE_CHAIN))
                line = [str(row["skips"]), f"{row['temperature']:g}", row["kind"], name, f"{a_pass:g}"]
                line += [f"{speed:.2f} ({rows:.0f})" for speed, rows in speeds.values()]
                lines.append([*line, f"{100 * (trees / chains - 1):+.0f} %"])
    parts.append("Speed, of plain decoding:\n\n" + table(header, lines))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--texts", type=int, default=2, help="of each kind")
    parser.add_argument("--skips", type=int, nargs="+", default=[3, 6, 9])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--prompt-tokens", type=int, default=600, help="the last ones of a prompt")
    parser.add_argument("--static-only", action="store_true", help="dynamic trees take nearly all of the time")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = str(smollm2_file())
    config, tokenizer = load_model_config(path), load_tokenizer(path)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        own = {"dtype": "bfloat16", "device": "cpu", "progress": False, "context_length": 4096}
        model = load_model(path, config, **own)
        prompts = {
            kind: [tokenizer.encode(body["text"])[-args.prompt_tokens :] for body in bodies(kind, args.texts, tokens=1)]
            for kind in args.kinds
        }
        cells = [(t, kind) for t in args.temperatures for kind in args.kinds]
        for temperature, kind in tqdm(cells, unit="cell", disable=None):
            answers = [(p, answered(model, p, args.tokens, temperature=temperature)) for p in prompts[kind]]
            for skips in args.skips:
                found = of_drafter(without_middle(model, skips), answers, temperature, dynamic=not args.static_only)
                rows.append({"skips": skips, "temperature": temperature, "kind": kind, **found})
                if args.output is not None:
                    result = {"environment": environment.describe(), "rows": rows}
                    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    print(render(rows))


def without_middle(model: DenseDecoder, count: int) -> DenseDecoder:
    """`model` without every other one of its layers in the middle: neighbours do alike."""
    first = (len(model._layers) - 2 * count) // 2
    gone = {first + 2 * i for i in range(count)}
    drafter, turns = copy(model), copy(model._turns)
    drafter._layers = [layer for i, layer in enumerate(model._layers) if i not in gone]
    turns.way_of = turns.way_of[: len(drafter._layers)]
    drafter._turns = turns
    return drafter


if __name__ == "__main__":
    main()
