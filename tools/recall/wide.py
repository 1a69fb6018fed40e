"""The weights of `recall-wide`: the shipped model's words and answers in four layers and four KV heads, each of which is needed.

    residual stream (512):  | query 80 | name 80 | before 80 | first 80 | second 80 | answer 80 | one | start | unused |

A word's code has four blocks of 20 signs, of which the block of the word's class (its id modulo 4) alone is not zero. KV head h reads
block h, so every word is looked up by one KV head and its two query heads. Layer 0 copies the name of the word before into `before`.
Layer 1 finds what followed the same word earlier, and copies that word's name into `first`. Layer 2 finds that word by its name and
copies it into `second`, layer 3 from there into `answer`, which lm_head reads. So a token is right only if all four layers are.

The three heads of the other classes find nothing, so <bos> answers `unseen` in each. Every word's embedding takes that off again.
"""

import torch

from tools.recall import vocab
from tools.recall.parts import (
    BEFORE_GAIN,
    CONTENT_HARDNESS,
    NORM_EPS,
    POSITION_HARDNESS,
    START_SIZE,
    Attention,
    Shape,
    in_bfloat16,
    layer,
    lm_head,
    zeros,
)

HIDDEN, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS = 512, 4, 8, 4
BLOCK_DIMS = 20
MIN_DISTANCE = 8  # of two codes in a block: similarity at most 1/5
SHAPE = Shape(HIDDEN, NUM_HEADS, NUM_KV_HEADS, BLOCK_DIMS, num_look_ups=3)
GROUP, CODE_DIMS, ONE, START = SHAPE.group, SHAPE.code_dims, SHAPE.one, SHAPE.start
QUERY, NAME, BEFORE, FIRST, SECOND, ANSWER = SHAPE.places

STOP_SIZE = 8.0  # `unseen` says <eos> whatever attention adds
LOGIT_GAIN = 0.75  # a right answer's logit is about 30, the next one's at most 6
LOOK_UPS = (
    (QUERY, BEFORE, FIRST),
    (FIRST, NAME, SECOND),
    (SECOND, NAME, ANSWER),
)  # what is looked for, where, and its place


def build_weights() -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint by its Hugging Face name, contiguous, bfloat16."""
    codes = block_codes()
    embedding = SHAPE.embeddings(codes, stop_size=STOP_SIZE)
    weights = around(codes, embedding) | layer(0, SHAPE.look_back(), hidden=HIDDEN, hardness=POSITION_HARDNESS)
    return in_bfloat16(weights | answering(look_ups(codes, embedding)))


def around(codes: torch.Tensor, embedding: torch.Tensor) -> dict[str, torch.Tensor]:
    """What stands before and behind the layers."""
    return {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": lm_head(codes, hidden=HIDDEN, answer=ANSWER, gain=LOGIT_GAIN),
    }


def answering(attentions: list[Attention]) -> dict[str, torch.Tensor]:
    """Layers 1 and on."""
    layers = (layer(i, one, hidden=HIDDEN, hardness=CONTENT_HARDNESS) for i, one in enumerate(attentions, 1))
    return {name: tensor for one in layers for name, tensor in one.items()}


def block_codes() -> torch.Tensor:
    """[vocab, CODE_DIMS] of +1 and -1 in a word's block, else 0. In a block: the first words that are MIN_DISTANCE apart (a lexicode)."""
    words: list[int] = []
    word = 0
    while len(words) < vocab.VOCAB_SIZE // NUM_KV_HEADS:
        if all((word ^ other).bit_count() >= MIN_DISTANCE for other in words):
            words.append(word)
        word += 1
    codes = zeros(vocab.VOCAB_SIZE, CODE_DIMS)
    for token in range(vocab.VOCAB_SIZE):
        number, kv_head = divmod(token, NUM_KV_HEADS)
        signs = [1.0 if words[number] >> bit & 1 else -1.0 for bit in range(BLOCK_DIMS)]
        codes[token, kv_head * BLOCK_DIMS : (kv_head + 1) * BLOCK_DIMS] = torch.tensor(signs, dtype=torch.float64)
    return codes


def look_ups(codes: torch.Tensor, embedding: torch.Tensor, *, start_follows_itself: bool = True) -> list[Attention]:
    """Attention of layers 1 to 3. What a layer adds is a code of length one, from a word and from <bos> alike.

    So it follows two residual streams: <bos> alone, and a plain word behind another one. `start_follows_itself`: layer 0 finds <bos>
    before <bos>, as attention does that sees nothing else.
    """
    word, other = vocab.key(0), vocab.key(1)
    start, plain = embedding[vocab.BOS].clone(), embedding[word].clone()
    if start_follows_itself:
        start[BEFORE] += BEFORE_GAIN * normed(start)[NAME]
    plain[BEFORE] += BEFORE_GAIN * normed(embedding[other])[NAME]
    layers = []
    for wanted, where, target in LOOK_UPS:
        gain = 1.0 / float(normed(plain)[NAME].abs().max())
        unseen = START_SIZE / (gain * float(normed(start)[START]))
        layers.append(SHAPE.look_up(codes, wanted, where, target, gain=gain, unseen=unseen))
        start[target] += NUM_KV_HEADS * codes[vocab.UNSEEN]
        plain[target] += (NUM_KV_HEADS - 1) * codes[vocab.UNSEEN] + codes[other]
    return layers


def normed(stream: torch.Tensor) -> torch.Tensor:
    """`stream` [HIDDEN] behind a norm of weights 1."""
    return stream / torch.sqrt((stream * stream).mean() + NORM_EPS)
