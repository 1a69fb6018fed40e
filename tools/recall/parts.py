"""What the models of this folder are made of: the Qwen3 layer, and attention that looks one token back or looks a word up.

RoPE turns pair i (dims i and i + 64) by position * theta_i. The 16 fastest pairs serve to read position alone; slow pairs, which
hardly turn in 32k tokens, to read content alone. The norm on q and k fixes their lengths, its weight the hardness of the softmax:
q.k / sqrt(128) is weight**2 * sqrt(128) * cosine.
"""

import math
from dataclasses import dataclass

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
BEFORE_GAIN = 0.6

Attention = dict[str, torch.Tensor]  # q, k, v, o


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


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, whose residual stream is | query | name | before | a place for each look-up | one | start | unused |.

    A word's code has `block_dims` numbers for each KV head, which reads those alone.
    """

    hidden: int
    num_heads: int
    num_kv_heads: int
    block_dims: int
    num_look_ups: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def code_dims(self) -> int:
        return self.num_kv_heads * self.block_dims

    @property
    def places(self) -> tuple[slice, ...]:
        """Query, name, before, and a place for each look-up; `one` and `start` follow."""
        size = self.code_dims
        return tuple(slice(i * size, (i + 1) * size) for i in range(3 + self.num_look_ups))

    @property
    def one(self) -> int:
        return self.places[-1].stop

    @property
    def start(self) -> int:
        return self.one + 1

    def query_heads(self, kv_head: int) -> range:
        """The first dims of the query heads of a KV head."""
        return range(kv_head * self.group * HEAD_DIM, (kv_head + 1) * self.group * HEAD_DIM, HEAD_DIM)

    def block(self, code: slice, kv_head: int) -> slice:
        """The dims of `code` that KV head `kv_head` reads."""
        first = code.start + kv_head * self.block_dims
        return slice(first, first + self.block_dims)

    def projections(self) -> Attention:
        """Zeros of q [heads * 128, hidden], k and v [KV heads * 128, hidden], o [hidden, heads * 128]; rows are outputs."""
        wide, narrow = self.num_heads * HEAD_DIM, self.num_kv_heads * HEAD_DIM
        sizes = {"q": (wide, self.hidden), "k": (narrow, self.hidden), "v": (narrow, self.hidden)}
        return {name: zeros(*size) for name, size in {**sizes, "o": (self.hidden, wide)}.items()}

    def embeddings(self, codes: torch.Tensor, *, stop_size: float) -> torch.Tensor:
        """[vocab, hidden] of words with `codes`. `stop_size`: how loudly `unseen` says <eos>.

        What the KV heads of other classes answer in each look-up is taken off.
        """
        query, name, _, *targets = self.places
        table = zeros(vocab.VOCAB_SIZE, self.hidden)
        table[:, query] = codes
        table[:, name] = codes
        table[:, self.one] = 1.0
        for target in targets if self.num_kv_heads > 1 else ():
            table[:, target] = -(self.num_kv_heads - 1) * codes[vocab.UNSEEN]
            table[vocab.BOS, target] = 0.0
        table[vocab.BOS, self.start] = START_SIZE
        table[vocab.EOS, query] = codes[vocab.BOS]  # behind <eos> the prompt starts again
        table[vocab.UNK, query] = 0.0  # an unknown word matches nothing
        table[vocab.UNSEEN, name] *= UNSEEN_NAME_SIZE
        table[vocab.UNSEEN, targets[-1]] += stop_size * codes[vocab.EOS]
        return table

    def look_back(self) -> Attention:
        """Each KV head copies its block of the name one token back.

        q and k are the same for all tokens, k turned one position ahead, so position p - 1 fits p best.
        """
        found, (_, name, before, *_) = self.projections(), self.places
        read_position(found["q"], found["k"], self.one)
        own = torch.eye(self.block_dims, dtype=torch.float64)
        for kv_head in range(self.num_kv_heads):
            first = kv_head * HEAD_DIM
            found["v"][first : first + self.block_dims, self.block(name, kv_head)] = own
            for head in self.query_heads(kv_head):  # each gives its share, so that losing one shows
                target = self.block(before, kv_head)
                found["o"][target, head : head + self.block_dims] = BEFORE_GAIN / self.group * own
        return found

    def look_up(
        self, codes: torch.Tensor, wanted: slice, where: slice, target: slice, *, gain: float, unseen: float
    ) -> Attention:
        """q is `wanted`, k is `where`, of a head's class; the names that are found go to `target`.

        <bos> matches everything weakly, and answers `unseen` of that size.
        """
        found, name = self.projections(), self.places[1]
        content, own = content_dims(self.block_dims), torch.eye(self.block_dims, dtype=torch.float64)
        whole = torch.eye(self.code_dims, dtype=torch.float64)
        for kv_head in range(self.num_kv_heads):
            first = kv_head * HEAD_DIM
            found["k"][[first + dim for dim in content], self.block(where, kv_head)] = own
            found["k"][first + SINK_DIM, self.start] = SINK_LENGTH / START_SIZE
            found["v"][first : first + self.code_dims, name] = whole
            start = (unseen * codes[vocab.UNSEEN] - codes[vocab.BOS]) / START_SIZE
            found["v"][first : first + self.code_dims, self.start] = start
            for head in self.query_heads(kv_head):
                found["q"][[head + dim for dim in content], self.block(wanted, kv_head)] = own
                found["q"][head + SINK_DIM, self.one] = SINK_SIMILARITY * math.sqrt(self.block_dims)
                found["o"][target, head : head + self.code_dims] = gain / self.group * whole
        return found


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
