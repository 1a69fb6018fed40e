"""Random trees of drafts in paged batches, and each row's path as a request of its own, whose tokens lie at their own positions."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch, TreePaths
from tests.attention.attention_cases import Heads, Sequence, fill, make_sequences, make_step


@dataclass(frozen=True)
class Tree:
    """Drafts behind `known` tokens. Node 0 is the request's newest token; nodes come by depth.

    `places`: of each node. `first`: the position from which on its paths say where tokens lie; None: no tree but a chain.
    """

    known: int
    parents: Items[int]
    places: Items[int]
    first: int | None

    def path(self, node: int) -> list[int]:
        """Return the nodes from the newest token to this one."""
        return [*(self.path(self.parents[node]) if node else ()), node]

    def start(self, node: int) -> int:
        """Return the position from which on the node's path says where tokens lie; none where all lie at their own, of every other node."""
        own = all(self.places[i] == self.known + n for n, i in enumerate(self.path(node)))
        kv_len = self.known + len(self.path(node))
        return kv_len if self.first is None or (own and node % 2 == 0) else self.first

    def kv_lens(self) -> list[int]:
        return [self.known + len(self.path(node)) for node in range(len(self.parents))]

    def tokens(self, node: int) -> list[int]:
        """Return what the node's row sees, of the request's known tokens and nodes, in this order."""
        return [*range(self.known), *(self.known + i for i in self.path(node))]


def random_tree(rng: np.random.Generator, known: int, nodes: int) -> Tree:
    """Its nodes lie anywhere among each other, its newest token at its own position."""
    depths, parents = [0], [0]
    for _ in range(1, nodes):
        parents.append(int(rng.choice([i for i, depth in enumerate(depths) if depth + 1 >= depths[-1]])))
        depths.append(depths[parents[-1]] + 1)
    places = [known, *(known + 1 + rng.permutation(nodes - 1)).tolist()]
    return Tree(known, parents, places, known + int(rng.integers(2)))


def chain(known: int, nodes: int) -> Tree:
    return Tree(known, [max(0, i - 1) for i in range(nodes)], range(known, known + nodes), None)


def some_trees(seed: int) -> list[Tree]:
    """Of contexts around the borders of blocks; beside a chain and a request without drafts."""
    rng = np.random.default_rng(seed)
    sizes = [(0, 4), (3, 9), (57, 17), (63, 6), (64, 1), (126, 12), (300, 20)]
    trees = [random_tree(rng, known, nodes) for known, nodes in sizes]
    to_a_border = Tree(62, [0, 0, 0, 0, 2], [62, 65, 63, 66, 64], 62)
    return [*trees[:3], chain(61, 5), to_a_border, *trees[3:], chain(90, 1)]


def tree_requests(heads: Heads, trees: Items[Tree], *, page_size: int, dtype: str) -> list[Sequence]:
    """Of each request the known tokens, then the nodes."""
    lengths = [tree.known + len(tree.parents) for tree in trees]
    return make_sequences(heads, lengths, page_size=page_size, dtype=dtype)


def tree_step(trees: Items[Tree], requests: Items[Sequence], *, page_size: int, more: int = 1) -> StepBatch:
    """All rows of all trees. `more`: places that no row uses."""
    whole = make_step(
        list(requests),
        [t.known for t in trees],
        [t.known + len(t.parents) for t in trees],
        page_size=page_size,
        extend=False,
    )
    slots, kv_lens, drafted = list[int](), list[int](), list[int]()
    pages, offsets, starts, places = list[int](), list[int](), list[int](), list[list[int]]()
    for tree, request, slot in zip(trees, requests, whole.slots.tolist(), strict=True):
        drafted += range(len(slots) + 1, len(slots) + len(tree.parents))
        for node, (place, kv_len) in enumerate(zip(tree.places, tree.kv_lens(), strict=True)):
            first = tree.start(node)
            slots.append(slot)
            kv_lens.append(kv_len)
            pages.append(request.pages[place // page_size])
            offsets.append(place % page_size)
            starts.append(first)
            places.append([tree.places[i] for i in tree.path(node)][first - tree.known :])
    width = max(len(each) for each in places) + more
    paths = TreePaths(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([each + [0] * (width - len(each)) for each in places], dtype=torch.int32),
    )
    return replace(
        whole,
        q_lens=[1] * len(slots),
        kv_lens=kv_lens,
        slots=torch.tensor(slots),
        token_pages=torch.tensor(pages),
        token_offsets=torch.tensor(offsets),
        drafted=frozenset(drafted),
        paths=paths,
    )


def new_rows(trees: Items[Tree], requests: Items[Sequence]) -> list[torch.Tensor]:
    """[rows, heads, dim] of all nodes: q, k, v."""
    return [
        torch.cat([getattr(request, name)[tree.known :] for tree, request in zip(trees, requests, strict=True)])
        for name in "qkv"
    ]


def rows_alone(trees: Items[Tree], requests: Items[Sequence], *, page_size: int) -> list[Sequence]:
    """Of each row a request of its path, in pages of its own."""
    found, used = list[Sequence](), 0
    for tree, request in zip(trees, requests, strict=True):
        for node in range(len(tree.parents)):
            tokens = tree.tokens(node)
            count = -(-len(tokens) // page_size)
            q, k, v = (getattr(request, name)[tokens] for name in "qkv")
            found.append(Sequence(q, k, v, list(range(used + 1, used + count + 1))))
            used += count
    return found


def step_alone(alone: Items[Sequence], *, page_size: int) -> StepBatch:
    """Plain decoding of the newest token of each."""
    ends = [len(s.k) for s in alone]
    return make_step(list(alone), [end - 1 for end in ends], ends, page_size=page_size, extend=False)


def fill_known(pool: KVPool, trees: Items[Tree], requests: Items[Sequence], *, layer: int = 0) -> None:
    fill(pool, list(requests), [tree.known for tree in trees], layer=layer)


def fill_alone(pool: KVPool, alone: Items[Sequence], *, layer: int = 0) -> None:
    fill(pool, list(alone), [len(s.k) - 1 for s in alone], layer=layer)


def pages_of(requests: Items[Sequence]) -> int:
    return sum(len(s.pages) for s in requests)


def behind_a_prompt(step: StepBatch, *, tokens: int, first_page: int, page_size: int) -> StepBatch:
    """A step of prompts with the rows of `step` as riders, which a new request of `tokens` stands before, in pages of its own."""
    at, slot = torch.arange(tokens), len(step.page_table)
    pages = -(-tokens // page_size)
    table = torch.nn.functional.pad(step.page_table, (0, max(0, pages - step.page_table.shape[1]), 0, 1))
    table[slot, :pages] = torch.arange(first_page, first_page + pages)
    assert step.paths is not None
    starts = torch.tensor([tokens], dtype=torch.int32)
    return replace(
        step,
        extend=True,
        q_lens=[tokens, *step.q_lens],
        kv_lens=[tokens, *step.kv_lens],
        page_table=table,
        slots=torch.cat((torch.tensor([slot]), step.slots)),
        token_pages=torch.cat((first_page + at // page_size, step.token_pages)),
        token_offsets=torch.cat((at % page_size, step.token_offsets)),
        riders=range(1, 1 + len(step.q_lens)),
        drafted=frozenset(i + 1 for i in step.drafted),
        paths=TreePaths(
            torch.cat((starts, step.paths.starts)), torch.nn.functional.pad(step.paths.places, (0, 0, 1, 0))
        ),
    )
