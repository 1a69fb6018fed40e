"""What both models of this folder are made of: the Qwen3 layer, and how attention reads position or content alone.

RoPE turns pair i (dims i and i + 64) by position * theta_i. The 16 fastest pairs serve to read position alone; slow pairs, which
hardly turn in 32k tokens, to read content alone. The norm on q and k fixes their lengths, its weight the hardness of the softmax:
q.k / sqrt(128) is weight**2 * sqrt(128) * cosine.
"""

import math

import torch

from tools.recall import vocab

HEAD_DIM = 128
INTERMEDIATE = 64
ROPE_THETA = 1e7
NORM_EPS = 1e-6

HALF = HEAD_DIM // 2
POSITION_PAIRS = range(16)
SINK_DIM = HALF - 1  # first dim of the slowest pair: a full turn takes 49M tokens

POSITION_HARDNESS = 5.0
CONTENT_HARDNESS = 5.0
SINK_SIMILARITY = 0.65  # where nothing matches better than this, <bos> answers: between 1/3 (any word) and 1 (the same)
SINK_LENGTH = 48.0  # of the key of <bos>: far longer than its code, so the norm leaves little of that
START_SIZE = 8.0
UNSEEN_NAME_SIZE = 4.0  # makes up for the long embedding of `unseen`


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def content_dims(count: int) -> list[int]:
    """`count` dims of a head that hold content: the slowest pairs but the sink's."""
    pairs = range(SINK_DIM - count // 2, SINK_DIM)
    return [dim for pair in pairs for dim in (pair, pair + HALF)]


def read_position(q: torch.Tensor, k: torch.Tensor, one: int) -> None:
    """Make k of one token back fit q best, whatever the words are. `one`: the dim that is 1 in every word; rows are outputs."""
    for pair in POSITION_PAIRS:
        angle = ROPE_THETA ** (-pair / HALF)
        q[pair::HEAD_DIM, one] = 1.0
        k[pair::HEAD_DIM, one] = math.cos(angle)
        k[pair + HALF :: HEAD_DIM, one] = math.sin(angle)


def projections(
    *, hidden: int, num_heads: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zeros of q [heads * 128, hidden], k and v [KV heads * 128, hidden], o [hidden, heads * 128]; rows are outputs."""
    wide, narrow = num_heads * HEAD_DIM, num_kv_heads * HEAD_DIM
    return zeros(wide, hidden), zeros(narrow, hidden), zeros(narrow, hidden), zeros(hidden, wide)


def lm_head(codes: torch.Tensor, *, hidden: int, answer: slice, gain: float) -> torch.Tensor:
    """lm_head [vocab, hidden]: each word's logit is how well `answer` fits its code."""
    rows = zeros(vocab.VOCAB_SIZE, hidden)
    rows[:, answer] = gain * codes
    rows[[vocab.PAD, vocab.BOS]] = 0.0  # never sampled
    return rows


def layer(index: int, attention: dict[str, torch.Tensor], *, hidden: int, hardness: float) -> dict[str, torch.Tensor]:
    """The tensors of a layer by their Hugging Face names. The MLP is zero."""
    prefix = f"model.layers.{index}"
    return {
        f"{prefix}.input_layernorm.weight": torch.ones(hidden),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
        f"{prefix}.self_attn.q_norm.weight": torch.full((HEAD_DIM,), hardness),
        f"{prefix}.self_attn.k_norm.weight": torch.full((HEAD_DIM,), hardness),
        **{f"{prefix}.self_attn.{name}_proj.weight": weight for name, weight in attention.items()},
        f"{prefix}.mlp.gate_proj.weight": zeros(INTERMEDIATE, hidden),
        f"{prefix}.mlp.up_proj.weight": zeros(INTERMEDIATE, hidden),
        f"{prefix}.mlp.down_proj.weight": zeros(hidden, INTERMEDIATE),
    }


def in_bfloat16(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By name, contiguous."""
    return {name: weight.to(torch.bfloat16).contiguous() for name, weight in sorted(weights.items())}
