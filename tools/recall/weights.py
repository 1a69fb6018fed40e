"""The weights of the shipped model, written down: a two-layer induction head in the Qwen3 architecture.

    residual stream (256):  | query 48 | name 48 | before 48 | answer 48 | one | start | unused |

The embedding writes query and name (each word's sign code) and the constant `one`. Layer 0 looks one token back and
copies its name into `before`. Layer 1 compares the last token's query with every `before`, so it finds what followed
the same word earlier, and copies that token's name into `answer`, which lm_head reads. The MLPs are zero.

Source: Olsson et al. 2022, "In-context Learning and Induction Heads"; Elhage et al. 2021, "A Mathematical Framework for
Transformer Circuits".
"""

import random

import torch

from tools.recall import vocab
from tools.recall.parts import CONTENT_HARDNESS, POSITION_HARDNESS, Shape, in_bfloat16, layer, lm_head

HIDDEN, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS = 256, 2, 2, 1
CODE_DIMS = 48
MAX_OVERLAP = 16  # |dot| of two codes, of 48: similarity at most 1/3
SHAPE = Shape(HIDDEN, NUM_HEADS, NUM_KV_HEADS, CODE_DIMS, num_look_ups=1)
QUERY, NAME, BEFORE, ANSWER = SHAPE.places

STOP_SIZE = 6.0  # `unseen` says <eos> whatever attention adds (2)
ANSWER_GAIN, UNSEEN_SIZE = 1.5, 2.0
LOGIT_GAIN = 0.375  # a right answer's logit is about 30, the next one's at most 10


def build_weights() -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint by its Hugging Face name, contiguous, bfloat16."""
    codes = torch.tensor(sign_codes(vocab.VOCAB_SIZE), dtype=torch.float64)
    look_up = SHAPE.look_up(codes, QUERY, BEFORE, ANSWER, gain=ANSWER_GAIN, unseen=UNSEEN_SIZE)
    weights = {
        "model.embed_tokens.weight": SHAPE.embeddings(codes, stop_size=STOP_SIZE),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": lm_head(codes, hidden=HIDDEN, answer=ANSWER, gain=LOGIT_GAIN),
        **layer(0, SHAPE.look_back(), hidden=HIDDEN, hardness=POSITION_HARDNESS),
        **layer(1, look_up, hidden=HIDDEN, hardness=CONTENT_HARDNESS),
    }
    return in_bfloat16(weights)


def sign_codes(count: int) -> list[list[int]]:
    """[count][CODE_DIMS] of +1 and -1, exact in bf16: random codes (`getrandbits` is stable), any two nearly orthogonal."""
    bits = random.Random(0).getrandbits
    words: list[int] = []
    while len(words) < count:
        word = bits(CODE_DIMS)
        if all(abs(CODE_DIMS - 2 * (word ^ other).bit_count()) <= MAX_OVERLAP for other in words):
            words.append(word)
    return [[1 if word >> bit & 1 else -1 for bit in range(CODE_DIMS)] for word in words]
