import pytest
import torch

from engine.attention.backend import make_attention_backend
from engine.attention.torch_backend import TorchBackend
from service.flags import ConfigError
from tests.attention.attention_cases import (
    TOLERANCE,
    Heads,
    filled_pool,
    make_pool,
    make_sequences,
    run_step,
    worst_error,
)

HEADS = Heads(q=4, kv=2, dim=16)


@pytest.mark.parametrize("name", ["torch", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("prefixes", [[0, 0, 0], [16, 33, 100], [0, 5, 70]])
def test_extend_equals_reference(name, dtype, page_size, prefixes):
    lengths = [40, 34, 133]
    sequences = make_sequences(HEADS, lengths, page_size=page_size, dtype=dtype)
    pool = filled_pool(HEADS, sequences, prefixes, page_size=page_size)
    backend = make_attention_backend(name, pool, num_heads=HEADS.q)
    outs = run_step(backend, sequences, prefixes, lengths, page_size=page_size)
    assert worst_error(outs, sequences, prefixes, lengths) < TOLERANCE[dtype]


def test_long_extend_crosses_query_tiles(monkeypatch):
    monkeypatch.setattr("engine.attention.torch_backend.QUERY_TILE", 32)
    sequences = make_sequences(HEADS, [150], page_size=16, dtype="float32")
    pool = filled_pool(HEADS, sequences, [37])
    outs = run_step(TorchBackend(pool), sequences, [37], [150], page_size=16)
    assert worst_error(outs, sequences, [37], [150]) < 2e-5


def test_a_bf16_cache_under_an_fp32_model_is_seen_alike_by_every_chunk():
    sequences = make_sequences(HEADS, [64], page_size=16, dtype="float32")
    whole, cut = (make_pool(HEADS, num_pages=4, page_size=16, dtype="bfloat16") for _ in range(2))
    out = run_step(TorchBackend(whole), sequences, [0], [64], page_size=16)[0]
    backend = TorchBackend(cut)
    parts = [run_step(backend, sequences, [a], [a + 32], page_size=16)[0] for a in (0, 32)]
    torch.testing.assert_close(torch.cat(parts), out, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "num_heads", "words"),
    [("triton", 4, "needs a GPU"), ("torch", 3, "not a multiple")],
)
def test_a_backend_that_cannot_work_says_why(name, num_heads, words):
    pool = make_pool(HEADS, num_pages=1, page_size=16)
    with pytest.raises(ConfigError, match=words):
        make_attention_backend(name, pool, num_heads=num_heads)
