"""The weights of `recall-wide`: the shipped model's words and answers in four layers and four KV heads, each of which is needed.

    residual stream (512):  | query 80 | name 80 | before 80 | first 80 | second 80 | answer 80 | one | start | unused |

A word's code has four blocks of 20 signs, of which the block of the word's class (its id modulo 4) alone is not zero. KV head h reads
block h, so every word is looked up by one KV head and its two query heads. Layer 0 copies the name of the word before into `before`.
Layer 1 finds what followed the same word earlier, and copies that word's name into `first`. Layer 2 finds that word by its name and
copies it into `second`, layer 3 from there into `answer`, which lm_head reads. So a token is right only if all four layers are.

The three heads of the other classes find nothing, so <bos> answers `unseen` in each. Every word's embedding takes that off again.
"""

import math

import torch

from tools.recall import vocab
from tools.recall.parts import (
    CONTENT_HARDNESS,
    HEAD_DIM,
    NORM_EPS,
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

HIDDEN = 512
NUM_LAYERS = 4
NUM_HEADS = 8
NUM_KV_HEADS = 4
GROUP = NUM_HEADS // NUM_KV_HEADS

BLOCK_DIMS = 20
MIN_DISTANCE = 8  # of two codes in a block: similarity at most 1/5
CODE_DIMS = NUM_KV_HEADS * BLOCK_DIMS
QUERY, NAME, BEFORE, FIRST, SECOND, ANSWER = (slice(i * CODE_DIMS, (i + 1) * CODE_DIMS) for i in range(6))
ONE = 6 * CODE_DIMS
START = ONE + 1

STOP_SIZE = 8.0  # `unseen` says <eos> whatever attention adds
BEFORE_GAIN = 0.6
LOGIT_GAIN = 0.75  # a right answer's logit is about 30, the next one's at most 6
LOOK_UPS = (
    (QUERY, BEFORE, FIRST),
    (FIRST, NAME, SECOND),
    (SECOND, NAME, ANSWER),
)  # what is looked for, where, and its place


def build_weights() -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint by its Hugging Face name, contiguous, bfloat16."""
    codes = block_codes()
    embedding = embeddings(codes)
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": lm_head(codes, hidden=HIDDEN, answer=ANSWER, gain=LOGIT_GAIN),
        **layer(0, _look_back(), hidden=HIDDEN, hardness=POSITION_HARDNESS),
    }
    for index, attention in enumerate(look_ups(codes, embedding), 1):
        weights |= layer(index, attention, hidden=HIDDEN, hardness=CONTENT_HARDNESS)
    return in_bfloat16(weights)


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


def embeddings(codes: torch.Tensor) -> torch.Tensor:
    """[vocab, HIDDEN] of words with `codes`."""
    table = zeros(vocab.VOCAB_SIZE, HIDDEN)
    table[:, QUERY] = codes
    table[:, NAME] = codes
    table[:, ONE] = 1.0
    for _, _, target in LOOK_UPS:
        table[:, target] = -(NUM_KV_HEADS - 1) * codes[vocab.UNSEEN]
        table[vocab.BOS, target] = 0.0
    table[vocab.BOS, START] = START_SIZE
    table[vocab.EOS, QUERY] = codes[vocab.BOS]  # behind <eos> the prompt starts again
    table[vocab.UNK, QUERY] = 0.0  # an unknown word matches nothing
    table[vocab.UNSEEN, NAME] *= UNSEEN_NAME_SIZE
    table[vocab.UNSEEN, ANSWER] += STOP_SIZE * codes[vocab.EOS]
    return table


def _look_back() -> dict[str, torch.Tensor]:
    """Layer 0: each KV head copies its block of the name one token back."""
    q, k, v, o = projections(hidden=HIDDEN, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS)
    read_position(q, k, ONE)
    for kv_head in range(NUM_KV_HEADS):
        first = kv_head * HEAD_DIM
        v[first : first + BLOCK_DIMS, block(NAME, kv_head)] = torch.eye(BLOCK_DIMS)
        for head in query_heads(kv_head):
            o[block(BEFORE, kv_head), head : head + BLOCK_DIMS] = BEFORE_GAIN / GROUP * torch.eye(BLOCK_DIMS)
    return {"q": q, "k": k, "v": v, "o": o}


def look_ups(
    codes: torch.Tensor, embedding: torch.Tensor, *, start_follows_itself: bool = True
) -> list[dict[str, torch.Tensor]]:
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
        layers.append(_look_up(codes, wanted, where, target, gain=gain, unseen=unseen))
        start[target] += NUM_KV_HEADS * codes[vocab.UNSEEN]
        plain[target] += (NUM_KV_HEADS - 1) * codes[vocab.UNSEEN] + codes[other]
    return layers


def _look_up(
    codes: torch.Tensor, wanted: slice, where: slice, target: slice, *, gain: float, unseen: float
) -> dict[str, torch.Tensor]:
    """q is `wanted`, k is `where`, of a head's class; <bos> matches everything weakly, and answers `unseen` of that size."""
    q, k, v, o = projections(hidden=HIDDEN, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS)
    content, own = content_dims(BLOCK_DIMS), torch.eye(BLOCK_DIMS, dtype=torch.float64)
    for kv_head in range(NUM_KV_HEADS):
        first = kv_head * HEAD_DIM
        k[[first + dim for dim in content], block(where, kv_head)] = own
        k[first + SINK_DIM, START] = SINK_LENGTH / START_SIZE
        v[first : first + CODE_DIMS, NAME] = torch.eye(CODE_DIMS)
        v[first : first + CODE_DIMS, START] = (unseen * codes[vocab.UNSEEN] - codes[vocab.BOS]) / START_SIZE
        for head in query_heads(kv_head):
            q[[head + dim for dim in content], block(wanted, kv_head)] = own
            q[head + SINK_DIM, ONE] = SINK_SIMILARITY * math.sqrt(BLOCK_DIMS)
            o[target, head : head + CODE_DIMS] = gain / GROUP * torch.eye(CODE_DIMS)
    return {"q": q, "k": k, "v": v, "o": o}


def query_heads(kv_head: int) -> range:
    """The first dims of the query heads of a KV head."""
    return range(kv_head * GROUP * HEAD_DIM, (kv_head + 1) * GROUP * HEAD_DIM, HEAD_DIM)


def block(code: slice, kv_head: int) -> slice:
    """The dims of `code` that KV head `kv_head` reads."""
    first = code.start + kv_head * BLOCK_DIMS
    return slice(first, first + BLOCK_DIMS)


def normed(stream: torch.Tensor) -> torch.Tensor:
    """`stream` [HIDDEN] behind a norm of weights 1."""
    return stream / torch.sqrt((stream * stream).mean() + NORM_EPS)
