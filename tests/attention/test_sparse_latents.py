"""Latent attention to the tokens that an index chooses: the kernel and torch against float64, token by token."""

import pytest
import torch

from engine.attention.backend import make_attention_backend
from engine.kv.cache_spec import CacheSpec
from engine.kv.kv_pool import KVPool
from engine.layers.latents import TokenChooser
from tests.attention.attention_cases import TOLERANCE, Heads, Sequence, latents_by_no_angle, make_sequences, make_step

PAGE, HEADS, RANK, DIM, INDEX_HEADS, INDEX, CHOSEN, SCALE = 16, 6, 32, 48, 8, 32, 40, 0.11
STARTS, ENDS = [0, 76, 0, 199, 130], [150, 77, 9, 300, 131]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_the_best_tokens_are_seen_and_no_others(name: str, dtype: str) -> None:
    """Rows with fewer tokens before them than are chosen see all; a whole block may hold none that is chosen. Scores are whole
    numbers, and several tie.
    """
    width = DIM + INDEX
    sequences = make_sequences(Heads(q=HEADS, kv=1, dim=width), ENDS, page_size=PAGE, dtype=dtype)
    generator = torch.Generator().manual_seed(1)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(getattr(torch, dtype))

    for s in sequences:
        s.k[:, 0, DIM:] = whole(-3, 4, len(s.k), INDEX)
        s.k[64:128, 0, DIM:] = -1  # of these relu leaves nothing
    rows = sum(b - a for a, b in zip(STARTS, ENDS, strict=True))
    chooser = TokenChooser(whole(0, 4, rows, INDEX_HEADS, INDEX), whole(1, 4, rows, INDEX_HEADS).float(), CHOSEN)
    out, first = _run(name, sequences, chooser, dtype=dtype), 0
    for s, start, end in zip(sequences, STARTS, ENDS, strict=True):
        for position in range(start, end):
            wanted = _reference(s, position, chooser.q[first], chooser.weights[first])
            assert (out[first].double() - wanted).abs().max() < TOLERANCE[dtype], (start, position)
            first += 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_chosen_is_not_read(dtype: str) -> None:
    """Keys of one token alone are best: what the others hold, be it NaN, changes no bit. They are what is left out of a pool of these."""
    sequences = make_sequences(Heads(q=HEADS, kv=1, dim=DIM + INDEX), ENDS, page_size=PAGE, dtype=dtype)
    rows = sum(b - a for a, b in zip(STARTS, ENDS, strict=True))
    ones = torch.ones(rows, INDEX_HEADS, INDEX, dtype=getattr(torch, dtype))
    chooser = TokenChooser(ones, torch.ones(rows, INDEX_HEADS), CHOSEN)
    for s in sequences:
        s.k[:, 0, DIM:] = -1  # of equal scores the first ones count
    found = _run("cpu", sequences, chooser, dtype=dtype)
    for s, start in zip(sequences, STARTS, strict=True):
        s.k[CHOSEN:start, 0, :DIM] = torch.nan
    again = _run("cpu", sequences, chooser, dtype=dtype)
    first = 0
    for start, end in zip(STARTS, ENDS, strict=True):
        seen = [first + position - start for position in range(start, end) if start > CHOSEN or position < CHOSEN]
        assert torch.equal(found[seen], again[seen]) and not again[seen].isnan().any()
        first += end - start


def test_equal_scores_are_ordered_by_position() -> None:
    keys = torch.tensor([[1.0], [2.0], [1.0], [3.0], [1.0], [1.0]])
    chooser = TokenChooser(torch.ones(3, 1, 1), torch.ones(3, 1), 3)
    found = {count: chooser.tokens(slice(0, 3), count, chooser.scores(keys[:count])).tolist() for count in (6, 4)}
    assert found == {6: [[0, 1, 3], [0, 1, 3], [0, 1, 3]], 4: [[0, 1, 2], [0, 1, 2], [0, 1, 3]]}
    broken = chooser.scores(torch.full_like(keys, torch.nan))
    assert chooser.tokens(slice(0, 3), 6, broken).tolist() == [[0, 1, 2]] * 3, "as many as ever"


def _run(name: str, sequences: list[Sequence], chooser: TokenChooser, *, dtype: str) -> torch.Tensor:
    spec = CacheSpec(num_kv_heads=1, head_dim=DIM + INDEX, dtype=dtype, latent=RANK, index=INDEX)
    pool = KVPool([spec], num_pages=max(max(s.pages) for s in sequences), page_size=PAGE, device="cpu")
    pool.k(0).fill_(torch.nan)
    for s, start in zip(sequences, STARTS, strict=True):
        at = torch.arange(start)
        pool.write(0, torch.tensor(s.pages)[at // PAGE] if start else at, at % PAGE, s.k[:start], s.k[:start])
    backend = make_attention_backend(name, pool, num_heads=HEADS)
    backend.begin(make_step(sequences, STARTS, ENDS, page_size=PAGE, extend=True))
    q, latents = (
        torch.cat([kept[a:b] for kept, a, b in zip(of, STARTS, ENDS, strict=True)])
        for of in ([s.q[:, :, :DIM] for s in sequences], [s.k[:, 0] for s in sequences])
    )
    return backend.attend(0, latents_by_no_angle(q, latents, rank=RANK, scale=SCALE, chooser=chooser))


def _reference(s: Sequence, position: int, q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    kept = s.k[: position + 1, 0].double()
    scores = ((kept[:, DIM:] @ q.double().T).relu() @ weights.double()).tolist()
    best = sorted(range(position + 1), key=lambda token: (-scores[token], token))[:CHOSEN]
    found = (s.q[position, :, :DIM].double() @ kept[best, :DIM].T * SCALE).softmax(-1)
    return (found @ kept[best, :RANK]).flatten()
