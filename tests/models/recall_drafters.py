"""Drafters of `recall-wide` that are right: EAGLE and EAGLE-3 checkpoints, written down as the model is.

One layer does what the model does in four. Behind token t it looks for the place where the token before was t, and answers the token
there:

    query    t, as the model's hidden state *before* it says: its answer; so a lost hidden state is a wrong draft
    key      the token before each place, by the hidden state before it
    value    the token there, by its embedding

All query heads do the same, each for its share of the answer. In EAGLE-3 what the layer gives lies on top of what it has read, pass after
pass, so two of its four KV heads take the token itself off again.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tools.recall import vocab
from tools.recall.parts import (
    HEAD_DIM,
    INTERMEDIATE,
    NORM_EPS,
    POSITION_PAIRS,
    ROPE_THETA,
    content_dims,
    in_bfloat16,
    zeros,
)
from tools.recall.wide import (
    ANSWER,
    BEFORE,
    CODE_DIMS,
    GROUP,
    HIDDEN,
    LOGIT_GAIN,
    NAME,
    NUM_HEADS,
    NUM_KV_HEADS,
    ONE,
    QUERY,
    SECOND,
    SHAPE,
    block_codes,
)

KINDS = ("EAGLE", "EAGLE3")
HARDNESS = 16.0  # of scores before the softmax, for codes of length one
SELF_HARDNESS = 14.0
ANSWER_SIZE = 4.0  # beside what it is added to
INSIDE = (0, 1, 2)  # layers whose outputs EAGLE3 reads; of the last, `second` is the answer


def build(kind: str, out_dir: Path) -> str:
    """Write a checkpoint; return its path. `kind`: of KINDS."""
    out_dir.mkdir(parents=True, exist_ok=True)
    tensors = _eagle() if kind == "EAGLE" else _eagle3()
    numbers = {name: tensors.pop(name) for name in ("d2t", "t2d") if name in tensors}
    save_file({**in_bfloat16(tensors), **numbers}, out_dir / "model.safetensors", metadata={"format": "pt"})
    (out_dir / "config.json").write_text(json.dumps(_config(kind), indent=2) + "\n", encoding="utf-8")
    return str(out_dir)


def _config(kind: str) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLMEagle" if kind == "EAGLE" else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": vocab.VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": vocab.BOS,
        "eos_token_id": vocab.EOS,
    }
    if kind == "EAGLE3":
        config["draft_vocab_size"] = vocab.VOCAB_SIZE - vocab.NUM_SPECIALS
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(INSIDE)}
    return config


def _eagle() -> dict[str, torch.Tensor]:
    """fc reads [embedding | hidden state]."""
    own, fc = torch.eye(CODE_DIMS, dtype=torch.float64), zeros(HIDDEN, 2 * HIDDEN)
    fc[NAME, NAME] = own
    fc[BEFORE, _of(1, NAME)] = own
    fc[QUERY, _of(1, ANSWER)] = own
    heads = range(NUM_KV_HEADS)
    attention = _attention(inputs=HIDDEN, query=QUERY, key=BEFORE, value=NAME, target=ANSWER, heads=heads)
    return {"fc.weight": fc, **_layer("layers.0", attention)}


def _eagle3() -> dict[str, torch.Tensor]:
    """fc reads three hidden states, attention [embedding | what fc gives]; the head lacks special tokens."""
    own, fc = torch.eye(CODE_DIMS, dtype=torch.float64), zeros(HIDDEN, len(INSIDE) * HIDDEN)
    fc[BEFORE, _of(0, NAME)] = own
    fc[QUERY, _of(2, SECOND)] = own
    look_up, itself = range(NUM_KV_HEADS // 2), range(NUM_KV_HEADS // 2, NUM_KV_HEADS)
    attention = _attention(
        inputs=2 * HIDDEN, query=_of(1, QUERY), key=_of(1, BEFORE), value=NAME, target=QUERY, heads=look_up
    )
    _take_off_itself(attention, heads=itself)
    codes = block_codes()[vocab.NUM_SPECIALS :]
    head = zeros(len(codes), HIDDEN)
    head[:, QUERY] = LOGIT_GAIN * codes
    return {
        "fc.weight": fc,
        **_layer("midlayer", attention),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
        "d2t": torch.full((len(codes),), vocab.NUM_SPECIALS),
        "t2d": torch.arange(vocab.VOCAB_SIZE) >= vocab.NUM_SPECIALS,
    }


def _layer(prefix: str, attention: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Its MLP is zero."""
    return {
        **{f"{prefix}.self_attn.{name}_proj.weight": weight for name, weight in attention.items()},
        f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{prefix}.mlp.gate_proj.weight": zeros(INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": zeros(INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": zeros(HIDDEN, INTERMEDIATE),
    }


def _attention(
    *, inputs: int, query: slice, key: slice, value: slice, target: slice, heads: range
) -> dict[str, torch.Tensor]:
    """`heads`: KV heads that look up."""
    q, k, v = (zeros(count * HEAD_DIM, inputs) for count in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    o, own = zeros(HIDDEN, NUM_HEADS * HEAD_DIM), torch.eye(CODE_DIMS, dtype=torch.float64)
    content = content_dims(CODE_DIMS)
    for kv_head in heads:
        first = kv_head * HEAD_DIM
        k[[first + dim for dim in content], key] = own
        v[first : first + CODE_DIMS, value] = own
        for head in SHAPE.query_heads(kv_head):
            q[[head + dim for dim in content], query] = HARDNESS * own
            o[target, head : head + CODE_DIMS] = ANSWER_SIZE / (GROUP * len(heads)) * own
    return {"q": q, "k": k, "v": v, "o": o}


def _take_off_itself(attention: dict[str, torch.Tensor], *, heads: range) -> None:
    """Let KV `heads` read the own position, and take its token off QUERY."""
    own = torch.eye(CODE_DIMS, dtype=torch.float64)
    for kv_head in heads:
        first = kv_head * HEAD_DIM
        attention["v"][first : first + CODE_DIMS, NAME] = own
        for pair in POSITION_PAIRS:
            attention["k"][first + pair, ONE] = SELF_HARDNESS
            for head in SHAPE.query_heads(kv_head):
                attention["q"][head + pair, ONE] = SELF_HARDNESS
        for head in SHAPE.query_heads(kv_head):
            attention["o"][QUERY, head : head + CODE_DIMS] = -ANSWER_SIZE / (GROUP * len(heads)) * own


def _of(part: int, code: slice) -> slice:
    """`code` in the `part`-th of several states side by side."""
    return slice(part * HIDDEN + code.start, part * HIDDEN + code.stop)
