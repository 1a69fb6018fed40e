"""The weights of the shipped model, written down: a two-layer induction head in the Qwen3 architecture.

    residual stream (256):  | query 48 | name 48 | before 48 | answer 48 | one | start | unused |

The embedding writes query and name (each word's sign code) and the constant `one`. Layer 0 looks one token back and
copies its name into `before`. Layer 1 compares the last token's query with every `before`, so it finds what followed
the same word earlier, and copies that token's name into `answer`, which lm_head reads. The MLPs are zero.

Source: Olsson et al. 2022, "In-context Learning and Induction Heads"; Elhage et al. 2021, "A Mathematical Framework for
Transformer Circuits".
"""

import math
import random

import torch

from tools.recall import vocab
from tools.recall.parts import (
    CONTENT_HARDNESS,
    HEAD_DIM,
    POSITION_HARDNESS,
    SINK_DIM,
    SINK_LENGTH,
    SINK_SIMILARITY,
    START_SIZE,
    UNSEEN_NAME_SIZE,
    content_dims,
    in_bfloat16,
    layer,
    lm_head,
    projections,
    read_position,
    zeros,
)

HIDDEN = 256
NUM_LAYERS = 2
NUM_HEADS = 2
NUM_KV_HEADS = 1

CODE_DIMS = 48
MAX_OVERLAP = 16  # |dot| of two codes, of 48: similarity at most 1/3

QUERY, NAME, BEFORE, ANSWER = (slice(i * CODE_DIMS, (i + 1) * CODE_DIMS) for i in range(4))
ONE = 4 * CODE_DIMS
START = ONE + 1

STOP_SIZE = 6.0  # `unseen` says <eos> whatever attention adds (2)
BEFORE_GAIN = 0.6
ANSWER_GAIN = 1.5
LOGIT_GAIN = 0.375  # a right answer's logit is about 30, the next one's at most 10


def build_weights() -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint by its Hugging Face name, contiguous, bfloat16."""
    codes = torch.tensor(sign_codes(vocab.VOCAB_SIZE), dtype=torch.float64)
    weights = {
        "model.embed_tokens.weight": _embedding(codes),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": lm_head(codes, hidden=HIDDEN, answer=ANSWER, gain=LOGIT_GAIN),
        **layer(0, _look_back(), hidden=HIDDEN, hardness=POSITION_HARDNESS),
        **layer(1, _look_up(codes), hidden=HIDDEN, hardness=CONTENT_HARDNESS),
    }
    return in_bfloat16(weights)


def _embedding(codes: torch.Tensor) -> torch.Tensor:
    table = zeros(vocab.VOCAB_SIZE, HIDDEN)
    table[:, QUERY] = codes
    table[:, NAME] = codes
    table[:, ONE] = 1.0
    table[vocab.BOS, START] = START_SIZE
    table[vocab.EOS, QUERY] = codes[vocab.BOS]  # behind <eos> the prompt starts again
    table[vocab.UNK, QUERY] = 0.0  # an unknown word matches nothing
    table[vocab.UNSEEN, NAME] *= UNSEEN_NAME_SIZE
    table[vocab.UNSEEN, ANSWER] = STOP_SIZE * codes[vocab.EOS]
    return table


def _look_back() -> dict[str, torch.Tensor]:
    """Layer 0: q and k are the same for all tokens, k turned one position ahead, so position p - 1 fits p best."""
    q, k, v, o = projections(hidden=HIDDEN, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS)
    read_position(q, k, ONE)
    v[:CODE_DIMS, NAME] = torch.eye(CODE_DIMS)
    _spread_over_heads(o, BEFORE, BEFORE_GAIN)
    return {"q": q, "k": k, "v": v, "o": o}


def _look_up(codes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Layer 1: q is the own word, k the word before; <bos> matches everything weakly and answers `unseen`."""
    q, k, v, o = projections(hidden=HIDDEN, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS)
    content = content_dims(CODE_DIMS)
    for head in range(NUM_HEADS):
        first = head * HEAD_DIM
        q[[first + dim for dim in content], QUERY] = torch.eye(CODE_DIMS, dtype=torch.float64)
        q[first + SINK_DIM, ONE] = SINK_SIMILARITY * math.sqrt(CODE_DIMS)
    k[content, BEFORE] = torch.eye(CODE_DIMS, dtype=torch.float64)
    k[SINK_DIM, START] = SINK_LENGTH / START_SIZE
    v[:CODE_DIMS, NAME] = torch.eye(CODE_DIMS)
    v[:CODE_DIMS, START] = (2 * codes[vocab.UNSEEN] - codes[vocab.BOS]) / START_SIZE
    _spread_over_heads(o, ANSWER, ANSWER_GAIN)
    return {"q": q, "k": k, "v": v, "o": o}


def _spread_over_heads(o: torch.Tensor, target: slice, gain: float) -> None:
    """Each head gives its share, so that losing one shows."""
    for head in range(NUM_HEADS):
        o[target, head * HEAD_DIM : head * HEAD_DIM + CODE_DIMS] = gain / NUM_HEADS * torch.eye(CODE_DIMS)


def sign_codes(count: int, *, seed: int = 0) -> list[list[int]]:
    """[count][CODE_DIMS] of +1 and -1, exact in bf16: random codes (`getrandbits` is stable), any two nearly orthogonal."""
    bits = random.Random(seed).getrandbits
    words: list[int] = []
    while len(words) < count:
        word = bits(CODE_DIMS)
        if all(abs(CODE_DIMS - 2 * (word ^ other).bit_count()) <= MAX_OVERLAP for other in words):
            words.append(word)
    return [[1 if word >> bit & 1 else -1 for bit in range(CODE_DIMS)] for word in words]
